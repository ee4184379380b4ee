// The position in a remembered text that a running request appears to be at.
//
// A walk follows the text across differences. When the request's token differs from the text's, the walk looks for that
// token a little further on (the request left something out). Otherwise it assumes a substitution and, if the next tokens
// disagree, an insertion. A token found further on may be a coincidence, so the position after a substitution is kept as an
// alternative until the next token decides. The score measures recent agreement: it grows by one per matching token and
// decays with every difference.
#pragma once

#include <algorithm>

#include "live_group.h"
#include "prompt_history.h"

namespace rhyme {

// The texts that a request's cursors point into, borrowed from the request. Each text is contiguous and closed by kEnd.
struct Texts {
    const PromptHistory* past = nullptr;
    const LiveGroup* live = nullptr;

    // Valid while the history is held and the live text does not grow.
    const Token* address(Position place) const { return place & kLive ? live->address(place) : past->address(place); }
};

// Points into texts, so it is valid only within one call of Drafter::draft(); a Cursor outlives the call.
struct Walk {
    const Token* next;  // the token expected next
    const Token* alternative = nullptr;  // the token expected next if `next` is a coincidence
    float score = 0.0f;
    int run = 0;  // matching tokens since the last difference
    int misses = 0;  // consecutive differences

    static constexpr float kMaxScore = 64.0f;
    static constexpr float kDifferenceDecay = 0.3f;
    static constexpr int kMaxSkipped = 2;  // consecutive tokens of the text that a request may leave out
    static constexpr int kMaxMisses = 3;  // more consecutive differences end the walk

    // Moves past the request's newest tokens; `rejoin`: continue after a difference. Returns false if the position is lost.
    bool follow(Span<Token> tokens, bool rejoin) {
        for (size_t i = 0;; ++i) {
            size_t run = 0;
            while (i + run < tokens.size() && next[run] != kEnd && next[run] == tokens[i + run]) ++run;
            if (run > 0) match(next + run, static_cast<int>(run));
            i += run;
            if (i == tokens.size()) return true;
            if (!rejoin || !differ(tokens[i])) return false;
        }
    }

  private:
    void match(const Token* place, int matched) {
        next = place;
        score = std::min(score + static_cast<float>(matched), kMaxScore);
        run += matched;
        misses = 0;
        alternative = nullptr;
    }

    bool differ(Token token) {
        if (*next == kEnd) return false;
        score *= kDifferenceDecay;
        run = 0;
        if (alternative && *alternative == token) {
            match(alternative + 1, 1);
            return true;
        }
        alternative = nullptr;
        for (int back = 1; back <= misses; ++back) {
            if (next[-back] == token) {  // not a substitution: the request has inserted tokens
                match(next - back + 1, 1);
                return true;
            }
        }
        for (int skipped = 1; skipped <= kMaxSkipped && next[skipped] != kEnd; ++skipped) {
            if (next[skipped] == token) {
                const Token* substituted = next + 1;
                match(next + skipped + 1, 1);
                alternative = substituted;
                return true;
            }
        }
        ++next;
        return ++misses <= kMaxMisses && *next != kEnd;
    }
};

// A walk between two engine steps, stored as positions because texts may move in memory.
struct Cursor {
    Position next = kNowhere;
    Position alternative = kNowhere;
    float score = 0.0f;
    int run = 0;
    int misses = 0;

    Walk walk(const Texts& texts) const {
        return {texts.address(next), alternative == kNowhere ? nullptr : texts.address(alternative), score, run, misses};
    }
    void stay(const Walk& walk, const Texts& texts) {  // `walk` is one from here
        const Token* start = texts.address(next);
        alternative = walk.alternative ? next + static_cast<Position>(walk.alternative - start) : kNowhere;
        next += static_cast<Position>(walk.next - start);
        score = walk.score;
        run = walk.run;
        misses = walk.misses;
    }
};

}  // namespace rhyme
