// Decides which of a batch's draft tokens are worth verifying.
//
// A step yields one token per request plus the accepted draft tokens. A draft token is worth the likelihood that it is
// accepted times the weight of its request. Tokens are taken in order of worth, up to the point of the highest worth per
// second. This amounts to one threshold for the whole batch; a threshold above every worth means no drafts.
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
    static constexpr float kNothing = 2.0f * kMaxWeight;  // a threshold above every worth

    // Returns the weight of a request from the tokens its answer is still expected to get and their mean over the batch.
    static float weight(double expected_rest, double mean_rest) {
        if (mean_rest <= 0.0) return 1.0f;
        return std::clamp(static_cast<float>(expected_rest / mean_rest), kLeastWeight, kMaxWeight);
    }

    // Adds token number `place` (from 1) of a draft: its likelihood and the weight of its request.
    void add(float likelihood, float weight, int place) {
        Level& level = levels_[level_of(weight * likelihood)];
        level.tokens += 1;
        level.accepted += likelihood;
        level.worth += weight * likelihood;
        level.longest = std::max(level.longest, place);
    }

    // Returns the lowest worth at which a token is verified in a step of `num_rows` requests. `pads_rows`: see StepBound.
    // `must_draft`: choose the best drafts even if an undrafted step is better.
    float threshold(int num_rows, const StepCost& cost, bool pads_rows, bool must_draft) const {
        const double plain = cost.seconds(StepSize::undrafted(num_rows), false);
        const double least_rate = plain > 0.0 && !must_draft ? kMargin * num_rows / plain : 0.0;  // expected tokens/s
        double best_rate = 0.0;                                                    // worth per second
        float best = kNothing;
        Level sum;
        for (size_t i = kLevels; i-- > 0;) {
            if (levels_[i].tokens == 0) continue;
            sum += levels_[i];
            const int sampled = pads_rows ? num_rows * (1 + sum.longest) : num_rows + sum.tokens;
            const double drafted = cost.seconds({num_rows + sum.tokens, sampled}, true);
            const double seconds = std::max(drafted, plain);  // drafts of unknown cost count as free, so they are tried
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
    static constexpr double kMargin = 1.06;  // drafting must win by this factor, because estimates are noisy

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
