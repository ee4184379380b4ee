// A place in a remembered text that a running request is thought to be at.
//
// A walk along the text survives differences: when the request's token is not the text's, it looks for the token a little
// further on (the request left something out), and otherwise assumes a substitution and, on the next tokens, an
// insertion. A token found further on may be chance: the place after a substitution is kept as an alternative until the
// next token decides. The score is the recent agreement in tokens: it grows by one a match and falls with every
// difference.
#pragma once

#include <algorithm>

#include "live_group.h"
#include "prompt_history.h"

namespace rhyme {

// The texts that a request's cursors point into; each text is contiguous and closed by kEnd.
struct Texts {
    const PromptHistory* past = nullptr;
    const LiveGroup* live = nullptr;

    const Token* address(Position place) const { return place & kLive ? live->address(place) : past->address(place); }
};

struct Walk {
    const Token* next;                   // the token expected next
    const Token* alternative = nullptr;  // where the request is if not at `next`
    float score = 0.0f;
    int run = 0;     // tokens that agree without a difference, up to here
    int misses = 0;  // differences since the last match

    static constexpr float kMaxScore = 64.0f;
    static constexpr float kDifferenceDecay = 0.3f;
    static constexpr int kMaxSkipped = 2;  // tokens of the text that a request may leave out at once
    static constexpr int kMaxMisses = 3;   // more differences in a row lose the place

    // Move past the tokens that the request has just got. False: the place is lost.
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
            if (next[-back] == token) {  // no substitution: the request had inserted tokens
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

// A walk between two engine steps: texts may have moved in memory by the next one.
struct Cursor {
    Position next = kNowhere;
    Position alternative = kNowhere;
    float score = 0.0f;
    int run = 0;
    int misses = 0;

    Walk walk(const Texts& texts) const {
        return {texts.address(next), alternative == kNowhere ? nullptr : texts.address(alternative), score, run,
                misses};
    }
    void stay(const Walk& walk, const Token* start) {  // where the walk has got from `start`, which was at `next`
        alternative = walk.alternative ? next + static_cast<Position>(walk.alternative - start) : kNowhere;
        next += static_cast<Position>(walk.next - start);
        score = walk.score;
        run = walk.run;
        misses = walk.misses;
    }
};

}  // namespace rhyme
