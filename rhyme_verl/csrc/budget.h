// How many of a batch's draft tokens are worth verifying?
//
// A step yields one token a request plus the accepted draft tokens. Draft tokens are spent in the order of their worth (the
// likelihood that they are accepted times the weight of their request) while worth per second rises; that comes down to
// one threshold for the whole batch, which may be above all worths: no drafts at all.
//
// The weights favour stragglers. A training step ends with its longest answer, so a token saved there is worth more than
// one of an answer that ends soon: a request weighs as much as the rest of its answer is expected to be long. Steps may
// yield fewer tokens per second for that, but never fewer than undrafted ones.
#pragma once

#include <algorithm>
#include <array>

#include "step_cost.h"

namespace rhyme {

class DraftBudget {
  public:
    static constexpr float kMaxWeight = 6.0f;  // of a request; the mean is 1
    static constexpr float kLeastWeight = 0.05f;
    static constexpr float kNothing = 2.0f * kMaxWeight;  // a worth that no token has

    // Weight of a request whose answer is expected to get so many tokens still, where it is `mean_rest` on average.
    static float weight(double expected_rest, double mean_rest) {
        if (mean_rest <= 0.0) return 1.0f;
        return std::clamp(static_cast<float>(expected_rest / mean_rest), kLeastWeight, kMaxWeight);
    }

    // Add the draft token at `place` (from 1 on) of a draft: its likelihood and the weight of its request.
    void add(float likelihood, float weight, int place) {
        Level& level = levels_[level_of(weight * likelihood)];
        level.tokens += 1;
        level.accepted += likelihood;
        level.worth += weight * likelihood;
        level.longest = std::max(level.longest, place);
    }

    // The lowest worth at which a token is verified in a step of `num_rows` requests; `pads_rows`: see StepBound;
    // `must_draft`: draft what is best even if no drafts are better.
    float threshold(int num_rows, const StepCost& cost, bool pads_rows, bool must_draft) const {
        const double plain = cost.seconds(StepSize::undrafted(num_rows), false);
        const double least_rate = plain > 0.0 && !must_draft ? kMargin * num_rows / plain : 0.0;  // of expected tokens
        double best_rate = 0.0;                                                    // of worth
        float best = kNothing;
        Level sum;
        for (size_t i = kLevels; i-- > 0;) {
            if (levels_[i].tokens == 0) continue;
            sum += levels_[i];
            const int sampled = pads_rows ? num_rows * (1 + sum.longest) : num_rows + sum.tokens;
            const double drafted = cost.seconds({num_rows + sum.tokens, sampled}, true);
            const double seconds = std::max(drafted, plain);  // an unseen kind of step is taken as free, and so tried
            if (seconds <= 0.0) return 0.0f;
            const double rate = (num_rows + sum.worth) / seconds;
            if ((num_rows + sum.accepted) / seconds <= least_rate || rate <= best_rate) continue;
            best_rate = rate;
            best = static_cast<float>(i) / static_cast<float>(kLevels) * kMaxWeight;
        }
        return best;
    }

  private:
    static constexpr size_t kLevels = 256;
    static constexpr double kMargin = 1.06;  // drafting has to win by this much: estimates are noisy

    struct Level {
        int tokens = 0;
        double accepted = 0.0;  // expected
        double worth = 0.0;
        int longest = 0;

        void operator+=(const Level& other) {
            tokens += other.tokens;
            accepted += other.accepted;
            worth += other.worth;
            longest = std::max(longest, other.longest);
        }
    };

    static size_t level_of(float worth) {
        if (!(worth > 0.0f)) return 0;
        return std::min(kLevels - 1, static_cast<size_t>(worth * (static_cast<float>(kLevels) / kMaxWeight)));
    }

    std::array<Level, kLevels> levels_{};
};

}  // namespace rhyme
