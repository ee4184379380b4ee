// Decides which of a batch's draft tokens are worth verifying.
//
// A step yields one token per request plus the accepted draft tokens. Draft tokens are taken in order of the likelihood
// that they are accepted, up to the point of most expected tokens per second. This amounts to one threshold for the whole
// batch; a threshold of 1 means no drafts. Where a bound on the step's tokens comes first, the likeliest ones are taken.
#pragma once

#include <algorithm>
#include <array>

#include "step_cost.h"

namespace rhyme {

class DraftBudget {
  public:
    static constexpr size_t kLevels = 256;  // of likelihood

    // Which tokens are verified: all from `level` on, and `spare` of the level below.
    struct Choice {
        size_t level = kLevels;
        int spare = 0;

        // Whether a token of this likelihood is verified. Ask once per token.
        bool takes(float likelihood) {
            const size_t its = level_of(likelihood);
            return its >= level || (its + 1 == level && spare-- > 0);
        }
        // Returns the lowest likelihood at which all tokens are verified; 1 if none are.
        float threshold() const { return static_cast<float>(level) / static_cast<float>(kLevels); }
    };

    // Adds token number `place` (from 1) of a draft.
    void add(float likelihood, int place) {
        Level& level = levels_[level_of(likelihood)];
        level.tokens += 1;
        level.accepted += likelihood;
        level.longest = std::max(level.longest, place);
    }

    // Returns which tokens are verified in a step of `num_rows` requests: at most `max_tokens`. `pads_rows`: see StepBound.
    // `must_draft`: choose the best drafts even if an undrafted step is better.
    Choice choose(int num_rows, const StepCost& cost, bool pads_rows, bool must_draft, int max_tokens) const {
        const double plain = cost.seconds(StepSize::undrafted(num_rows), false);
        double best_rate = plain > 0.0 && !must_draft ? kMargin * num_rows / plain : 0.0;  // expected tokens/s
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
            const double rate = is_unknown ? 0.0 : (num_rows + sum.accepted) / seconds;
            if (!is_unknown && rate <= best_rate) continue;
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
        int longest = 0;

        // Adds `count` of another level's tokens, which are as likely as all of them in the mean.
        void add(const Level& other, int count) {
            const double share = static_cast<double>(count) / other.tokens;
            tokens += count;
            accepted += share * other.accepted;
            longest = std::max(longest, other.longest);
        }
    };

    static size_t level_of(float likelihood) {
        if (!(likelihood > 0.0f)) return 0;  // also NaN
        return std::min(kLevels - 1, static_cast<size_t>(std::min(likelihood, 1.0f) * static_cast<float>(kLevels)));
    }

    std::array<Level, kLevels> levels_{};
};

}  // namespace rhyme
