// The finished answers of one prompt, and where in them a given run of tokens occurs. Immutable once built: new answers
// make a new history from the old one (merge), so readers need no lock and never wait for ingest.
//
// Answers stand one after another in a single token array, oldest first, each closed by kEnd, so a position names a
// place in an answer and "the next token of that answer" is one load. Every gram is chained to the previous one with the same
// hash (newest first): a search costs one hash and a short walk. What followed each context of a few tokens is counted, too.
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
    int window_epochs;              // distinct rollout steps of a prompt that are kept
    int64_t max_tokens_per_prompt;
    int64_t max_bytes;              // of all prompts
};

// Finished answers of one prompt; all spans but `tokens` have one value an answer.
struct AnswerBatch {
    Span<Token> tokens;  // of all answers, one after another
    Span<int32_t> lengths;
    Span<int64_t> steps;  // rollout step (weights version) of each answer
    Span<uint64_t> ids;   // an answer replaces an earlier one with its id
};

class PromptHistory {
  public:
    // The answers of `old` (may be null) and `batch` within the limits. Token ids are >= 0; empty answers are ignored.
    static std::shared_ptr<const PromptHistory> merge(const PromptHistory* old, const AnswerBatch& batch,
                                                      const HistoryLimits& limits);

    // Places after runs of at least kGramTokens tokens that end `context`, newest first; at most `max_matches` are
    // written. Returns how many. A place at an answer's end is found too: at() is kEnd there.
    size_t find_suffix(Span<Token> context, Match* matches, size_t max_matches) const;

    // The newest `max_places` answers, as the places of their first tokens, newest first. Returns how many.
    size_t starts(Position* places, size_t max_places) const;

    Token at(Position position) const { return tokens_[position]; }
    const Token* address(Position position) const { return &tokens_[position]; }

    // What followed the last few tokens in any of the answers.
    const ContextCounts& counts() const { return counts_; }

    // How many tokens an answer that has `length` of them is expected to get still, by the answers that were longer; those
    // that outlive them all are expected to get half of what they have.
    double expected_rest(size_t length) const;

    int64_t num_tokens() const { return static_cast<int64_t>(tokens_.size() - answers_.size()); }
    int64_t num_answers() const { return static_cast<int64_t>(answers_.size()); }
    int64_t num_bytes() const;

    // Empty if all invariants hold, else what is wrong.
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
    std::vector<Position> prev_;  // prev_[i]: an earlier place after a gram with the same hash, or kNowhere
    NewestPlaces newest_;
    std::vector<Answer> answers_;
    ContextCounts counts_;
};

}  // namespace rhyme
