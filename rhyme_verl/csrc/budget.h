// Decides which of a batch's draft tokens are worth verifying.
//
// A step yields one token per request plus the accepted draft tokens. A draft token is worth the likelihood that it is
// accepted times the weight of its request. Tokens are taken in order of worth, up to the point of the highest worth per
// second. This amounts to one threshold for the whole batch; a threshold above every worth means no drafts. Where a
// bound on the step's tokens comes first, the tokens that are worth most are taken.
//
// The weights favour stragglers: a training step ends with its longest answer, so a token saved there is worth more than
// one in an answer that ends soon. As long as new requests come, every token counts the same. A request's weight is
// proportional to the tokens that its answer is still expected to get. Steps may yield fewer tokens per second for that,
// but not fewer than undrafted steps.
#pragma once

#include <algorithm>
#include <array>

#include "step_cost.h"

namespace rhyme {

class DraftBudget {
  public:
    static constexpr float kMaxWeight = 6.0f;  // of a request; the mean weight is 1
    static constexpr float kLeastWeight = 0.05f;
    static constexpr size_t kLevels = 256;  // of worth, from 0 to kMaxWeight

    // Which tokens are verified: all from `level` of worth on, and `spare` of the level below.
    struct Choice {
        size_t level = kLevels;
        int spare = 0;

        // Whether a token of this worth is verified. Ask once per token.
        bool takes(float worth) {
            const size_t its = level_of(worth);
            return its >= level || (its + 1 == level && spare-- > 0);
        }
        // Returns the lowest worth at which all tokens are verified; kMaxWeight if none are.
        float threshold() const { return static_cast<float>(level) / static_cast<float>(kLevels) * kMaxWeight; }
    };

    // Adds token number `place` (from 1) of a draft: its likelihood and the weight of its request.
    void add(float likelihood, float weight, int place) {
        Level& level = levels_[level_of(weight * likelihood)];
        level.tokens += 1;
        level.accepted += likelihood;
        level.worth += weight * likelihood;
        level.longest = std::max(level.longest, place);
    }

    // Returns which tokens are verified in a step of `num_rows` requests: at most `max_tokens`. `pads_rows`: see StepBound.
    // `must_draft`: choose the best drafts even if an undrafted step is better.
    Choice choose(int num_rows, const StepCost& cost, bool pads_rows, bool must_draft, int max_tokens) const {
        const double plain = cost.seconds(StepSize::undrafted(num_rows), false);
        const double least_rate = plain > 0.0 && !must_draft ? kMargin * num_rows / plain : 0.0;  // expected tokens/s
        double best_rate = 0.0;  // worth per second
        Choice best;
        Level sum;
        for (size_t i = kLevels; i-- > 0 && sum.tokens < max_tokens;) {
            if (levels_[i].tokens == 0) continue;
            const int left = max_tokens - sum.tokens;
            sum.add(levels_[i], std::min(left, levels_[i].tokens));
            const int sampled = pads_rows ? num_rows * (1 + sum.longest) : num_rows + sum.tokens;
            const double drafted = cost.seconds({num_rows + sum.tokens, sampled}, true);
            const double seconds = std::max(drafted, plain);  // drafts of unknown cost count as free, so they are tried
            const bool is_unknown = seconds <= 0.0;
            const double rate = is_unknown ? 0.0 : (num_rows + sum.worth) / seconds;
            if (!is_unknown && ((num_rows + sum.accepted) / seconds <= least_rate || rate <= best_rate)) continue;
            best_rate = rate;
            best = levels_[i].tokens <= left ? Choice{i, 0} : Choice{i + 1, left};
        }
        return best;
    }

  private:
    static constexpr double kMargin = 1.1;  // drafting must win by this factor, because estimates are noisy

    struct Level {
        int tokens = 0;
        double accepted = 0.0;  // expected
        double worth = 0.0;
        int longest = 0;

        // Adds `count` of another level's tokens, which are worth the mean of all.
        void add(const Level& other, int count) {
            const double share = static_cast<double>(count) / other.tokens;
            tokens += count;
            accepted += share * other.accepted;
            worth += share * other.worth;
            longest = std::max(longest, other.longest);
        }
    };

    static size_t level_of(float worth) {
        if (!(worth > 0.0f)) return 0;  // also NaN
        return std::min(kLevels - 1, static_cast<size_t>(worth * (static_cast<float>(kLevels) / kMaxWeight)));
    }

    std::array<Level, kLevels> levels_{};
};

}  // namespace rhyme
