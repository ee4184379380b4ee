// A place in a past answer that a running request is thought to be at.
//
// A cursor survives differences: when the request's token is not the answer's, the cursor looks for the token a little
// further on (the request left something out), and otherwise assumes a substitution and, on the next token, an
// insertion. Its score is the recent agreement in tokens: it grows by one a match and falls with every difference.
#pragma once

#include <algorithm>

#include "prompt_history.h"

namespace rhyme {

struct Cursor {
    Position next = kNowhere;  // the token expected next
    float score = 0.0f;
    int run = 0;     // tokens matched since the last difference
    int misses = 0;  // differences since the last match

    static constexpr float kMaxScore = 64.0f;
    static constexpr float kDifferenceDecay = 0.5f;
    static constexpr int kMaxSkipped = 4;  // tokens of the past answer that a request may leave out at once
    static constexpr int kMaxMisses = 3;   // more differences in a row lose the place

    // Move past `token`, which the request has just got. False: the place is lost.
    bool follow(const PromptHistory& history, Token token) {
        const Token expected = history.at(next);
        if (expected == token) {
            advance(next + 1, 1);
            return true;
        }
        if (expected == kEnd) return false;
        score *= kDifferenceDecay;
        run = 0;
        if (misses > 0 && history.at(next - 1) == token) {  // not a substitution: the request had inserted a token
            advance(next, 1);
            return true;
        }
        Position place = next;
        for (int skipped = 1; skipped <= kMaxSkipped; ++skipped) {
            const Token later = history.at(++place);
            if (later == kEnd) break;
            if (later == token) {
                advance(place + 1, 1);
                return true;
            }
        }
        ++next;
        return ++misses <= kMaxMisses && history.at(next) != kEnd;
    }

  private:
    void advance(Position place, int matched) {
        next = place;
        score = std::min(score + static_cast<float>(matched), kMaxScore);
        run += matched;
        misses = 0;
    }
};

}  // namespace rhyme
