// The past answers of one prompt, and where in them a given run of tokens occurs.
//
// Answers stand one after another in a single token array, oldest first, each closed by kEnd, so a position in the
// array names a place in an answer and "the next token of that answer" is one load. Every run of `gram` tokens is
// chained to the previous run with the same hash (newest first), so a search costs one hash and a short walk.
//
// Invariants: tokens_.size() == prev_.size(); every answer is followed by exactly one kEnd; chains go strictly
// backwards; steps of answers_ never decrease. Not thread-safe: callers hold mutex().
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "span.h"

namespace rhyme {

using Token = int32_t;
using Position = uint32_t;

constexpr Token kEnd = -1;
constexpr Position kNowhere = UINT32_MAX;

struct HistoryLimits {
    int gram_tokens = 3;            // tokens that must agree for a match
    int window_epochs = 3;          // distinct rollout steps of a prompt that are kept
    int64_t max_tokens = 1 << 18;   // bound on tokens kept for a prompt
};

struct Match {
    Position next = kNowhere;  // place of the token after the match
    int length = 0;            // tokens that agree, at most the search's limit
};

class PromptHistory {
  public:
    explicit PromptHistory(const HistoryLimits& limits);

    // Append a finished answer (token ids >= 0, the end-of-text token included) of rollout step `step`; answers that
    // fall out of the window or the token bound are dropped, and then every position becomes invalid (see version()).
    void add(Span<Token> answer, int64_t step);

    // Places after the runs of at least gram_tokens tokens that end `context`, the newest first; at most `max_matches`
    // are written to `matches`. Returns how many. A place outside every answer is never returned.
    size_t find_suffix(Span<Token> context, Match* matches, size_t max_matches) const;

    // The newest `max_places` answers, as the places of their first tokens, the newest first. Returns how many.
    size_t starts(Position* places, size_t max_places) const;

    Token at(Position position) const { return tokens_[position]; }

    // Changes whenever positions handed out before are no longer valid.
    uint64_t version() const { return version_; }
    int64_t num_tokens() const { return static_cast<int64_t>(tokens_.size()) - static_cast<int64_t>(answers_.size()); }
    int64_t num_answers() const { return static_cast<int64_t>(answers_.size()); }
    int64_t num_bytes() const;
    std::mutex& mutex() const { return mutex_; }

    // Empty if all invariants hold, else what is wrong.
    const char* check_integrity() const;

  private:
    struct Answer {
        Position begin;
        int64_t step;
    };

    void append(Span<Token> answer, int64_t step);
    bool evict(int64_t newest_step, size_t incoming);
    void index_from(size_t begin);
    void grow_table();
    uint64_t bucket_of(const Token* gram) const;

    HistoryLimits limits_;
    std::vector<Token> tokens_;
    std::vector<Position> prev_;   // prev_[i]: an earlier place after a gram with the same hash, or kNowhere
    std::vector<Position> heads_;  // newest place by hash; its size is a power of two
    std::deque<Answer> answers_;
    uint64_t version_ = 0;
    mutable std::mutex mutex_;
};

}  // namespace rhyme
