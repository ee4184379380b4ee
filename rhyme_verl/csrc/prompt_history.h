// The finished answers of one prompt, and where in them a given run of tokens occurs. Immutable once built: new answers
// make a new history from the old one (merge), so readers need no lock and never wait for ingest.
//
// Answers stand one after another in a single token array, oldest first, each closed by kEnd, so a position names a
// place in an answer and "the next token of that answer" is one load. Every run of `gram_tokens` tokens is chained to
// the previous run with the same hash (newest first): a search costs one hash and a short walk.
//
// Invariants: tokens_.size() == prev_.size(); every answer is followed by exactly one kEnd; chains go strictly
// backwards; steps of answers_ never decrease.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "span.h"
#include "tokens.h"

namespace rhyme {

struct HistoryLimits {
    int gram_tokens = 3;                        // tokens that must agree for a match
    int window_epochs = 3;                      // distinct rollout steps of a prompt that are kept
    int64_t max_tokens_per_prompt = 1 << 18;
    int64_t max_bytes = int64_t{4} << 30;       // of all prompts
    double recency_weight = 1.0;                // an answer counts this much less for every epoch it is older
    double reward_weight = 0.0;                 // an answer of more than mean reward counts this much more
};

// Finished answers of one prompt; all spans but `tokens` have one value an answer.
struct AnswerBatch {
    Span<Token> tokens;  // of all answers, one after another
    Span<int32_t> lengths;
    Span<int64_t> steps;   // rollout step (weights version) of each answer
    Span<float> rewards;   // NaN: not known
    Span<uint64_t> ids;    // an answer replaces an earlier one with its id
};

class PromptHistory {
  public:
    // The answers of `old` (may be null) and `batch` within the limits. Token ids are >= 0; empty answers are ignored.
    static std::shared_ptr<const PromptHistory> merge(const PromptHistory* old, const AnswerBatch& batch,
                                                      const HistoryLimits& limits);

    // Places after runs of at least gram_tokens tokens that end `context`, newest first; at most `max_matches` are
    // written. Returns how many. A place at an answer's end is found too: at() is kEnd there.
    size_t find_suffix(Span<Token> context, Match* matches, size_t max_matches) const;

    // The newest `max_places` answers, as the places of their first tokens, newest first. Returns how many.
    size_t starts(Position* places, size_t max_places) const;

    Token at(Position position) const { return tokens_[position]; }
    const Token* address(Position position) const { return &tokens_[position]; }

    // How much the answer at this place counts in a vote: its recency times its reward's share.
    float weight_at(Position position) const;

    int64_t num_tokens() const { return static_cast<int64_t>(tokens_.size() - answers_.size()); }
    int64_t num_answers() const { return static_cast<int64_t>(answers_.size()); }
    int64_t num_bytes() const;

    // Empty if all invariants hold, else what is wrong.
    const char* check_integrity() const;

  private:
    struct Answer {
        uint64_t id;
        int64_t step;
        float reward;
        float weight;
        Position begin;
        uint32_t size;
    };

    void weigh(const HistoryLimits& limits);
    void build_chains();
    uint32_t bucket_of(const Token* gram) const {
        return static_cast<uint32_t>((uint64_t{hash_gram(gram, gram_tokens_)} * heads_.size()) >> 32);
    }

    int gram_tokens_ = 0;
    std::vector<Token> tokens_;
    std::vector<Position> prev_;   // prev_[i]: an earlier place after a gram with the same hash, or kNowhere
    std::vector<Position> heads_;  // newest place by hash
    std::vector<Answer> answers_;
};

}  // namespace rhyme
