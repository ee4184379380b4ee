// A place in a remembered text that a running request is thought to be at.
//
// A cursor survives differences: when the request's token is not the text's, the cursor looks for the token a little
// further on (the request left something out), and otherwise assumes a substitution and, on the next tokens, an
// insertion. Its score is the recent agreement in tokens: it grows by one a match and falls with every difference.
#pragma once

#include <algorithm>

#include "live_group.h"
#include "prompt_history.h"

namespace rhyme {

// The texts that a request's cursors point into.
struct Texts {
    const PromptHistory* past = nullptr;
    const LiveGroup* live = nullptr;

    Token at(Position place) const { return place & kLive ? live->at(place) : past->at(place); }
};

struct Cursor {
    Position next = kNowhere;  // the token expected next
    float score = 0.0f;
    float weight = 1.0f;  // of its text
    int16_t run = 0;      // tokens matched since the last difference
    int16_t misses = 0;   // differences since the last match

    static constexpr float kMaxScore = 64.0f;
    static constexpr float kDifferenceDecay = 0.3f;
    static constexpr int kMaxSkipped = 4;  // tokens of the text that a request may leave out at once
    static constexpr int kMaxMisses = 3;   // more differences in a row lose the place

    float vote() const { return weight * (1.0f + score) * (1.0f + score); }

    // Move past `token`, which the request has just got where the text has `expected`. False: the place is lost.
    bool follow(const Texts& texts, Token expected, Token token, bool rejoin) {
        if (expected == token) {
            match(next + 1);
            return true;
        }
        return rejoin && expected != kEnd && differ(texts, token);
    }

  private:
    void match(Position place) {
        next = place;
        score = std::min(score + 1.0f, kMaxScore);
        if (run < INT16_MAX) ++run;
        misses = 0;
    }

    bool differ(const Texts& texts, Token token) {
        score *= kDifferenceDecay;
        run = 0;
        for (Position back = 1; back <= static_cast<Position>(misses); ++back) {
            if (texts.at(next - back) == token) {  // no substitution: the request had inserted tokens
                match(next - back + 1);
                return true;
            }
        }
        Position place = next;
        for (int skipped = 1; skipped <= kMaxSkipped; ++skipped) {
            const Token later = texts.at(++place);
            if (later == kEnd) break;
            if (later == token) {
                match(place + 1);
                return true;
            }
        }
        ++next;
        return ++misses <= kMaxMisses && texts.at(next) != kEnd;
    }
};

}  // namespace rhyme
