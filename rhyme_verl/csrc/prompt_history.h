// The finished answers of one prompt, with an index of where runs of tokens occur in them. Immutable once built: merge()
// makes a new history from the old one and new answers, so readers need no lock and never wait for ingest. Pointers into a
// history are valid as long as a shared_ptr holds it.
//
// Answers are stored one after another in a single token array, oldest first, each closed by kEnd. A position is an index
// into this array, so the next token of an answer is one load. Every gram is chained to the previous one with the same
// hash, so a search takes one hash and a short walk, newest first. The followers of short contexts are counted as well.
//
// Invariants: tokens_.size() == prev_.size(); every answer is followed by exactly one kEnd; chains go strictly
// backwards; steps of answers_ never decrease.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "context_counts.h"
#include "span.h"
#include "tokens.h"

namespace rhyme {

struct HistoryLimits {
    int window_epochs;              // number of rollout steps per prompt whose answers are kept
    int64_t max_tokens_per_prompt;
    int64_t max_bytes;              // over all prompts
};

// Finished answers of one prompt. Every span but `tokens` has one value per answer. The caller owns the values.
struct AnswerBatch {
    Span<Token> tokens;  // all answers, one after another
    Span<int32_t> lengths;
    Span<int64_t> steps;  // place of its rollout among those of the prompt, of each answer
    Span<uint64_t> ids;   // an answer replaces an earlier one with the same id
};

class PromptHistory {
  public:
    // Copies the answers of `old` (may be null) and `batch` within the limits. Ignores empty answers. Token ids are >= 0.
    static std::shared_ptr<const PromptHistory> merge(const PromptHistory* old, const AnswerBatch& batch,
                                                      const HistoryLimits& limits);

    // Writes the positions after runs of at least kGramTokens tokens that equal the end of `context`, newest first, and
    // returns how many. `matches` has room for `max_matches`. A match may lie at an answer's end, where at() is kEnd.
    size_t find_suffix(Span<Token> context, Match* matches, size_t max_matches) const;

    // Writes the positions of the first tokens of the newest `max_places` answers, newest first. Returns how many.
    size_t starts(Position* places, size_t max_places) const;

    Token at(Position position) const { return tokens_[position]; }
    const Token* address(Position position) const { return &tokens_[position]; }

    // Counts over all answers.
    const ContextCounts& counts() const { return counts_; }

    // Returns how many more tokens an answer of `length` tokens is expected to get: their mean over the longer answers, or
    // half of `length` if there are none.
    double expected_rest(size_t length) const;

    int64_t num_tokens() const { return static_cast<int64_t>(tokens_.size() - answers_.size()); }
    int64_t num_answers() const { return static_cast<int64_t>(answers_.size()); }
    int64_t num_bytes() const;

    // Returns a static string: empty if all invariants hold, otherwise what is wrong.
    const char* check_integrity() const;

  private:
    struct Answer {
        uint64_t id;
        int64_t step;
        Position begin;
        uint32_t size;
    };

    void index_tokens();

    std::vector<Token> tokens_;
    std::vector<Position> prev_;  // prev_[i]: an earlier position after a gram with the same hash, or kNowhere
    NewestPlaces newest_;
    std::vector<Answer> answers_;
    ContextCounts counts_;
};

}  // namespace rhyme
