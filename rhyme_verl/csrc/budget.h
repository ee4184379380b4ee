// How many of a batch's draft tokens are worth verifying?
//
// A step yields one token a request plus the accepted draft tokens. Draft tokens are spent in the order of their
// likelihood while expected tokens per second rise; that comes down to one likelihood threshold for the whole batch,
// which may be above 1: no drafts at all.
#pragma once

#include <array>

#include "step_cost.h"

namespace rhyme {

class DraftBudget {
  public:
    // Add the draft token at `place` (from 1 on) of its draft, whose likelihood (that it and all before it are
    // accepted) is in [0, 1].
    void add(float likelihood, int place) {
        Level& level = levels_[static_cast<size_t>(level_of(likelihood))];
        level.tokens += 1;
        level.accepted += likelihood;
        level.longest = std::max(level.longest, place);
    }

    // The least likelihood worth verifying in a step of `num_rows` requests; `pads_rows`: see Drafter::StepBound.
    float threshold(int num_rows, const StepCost& cost, bool pads_rows) const {
        const double plain = cost.seconds(StepSize::undrafted(num_rows), false);
        double best_rate = plain > 0.0 ? kMargin * num_rows / plain : 0.0;
        float best = 2.0f;
        int tokens = 0, longest = 0;
        double accepted = 0.0;
        for (int level = kLevels - 1; level >= 0; --level) {
            if (levels_[static_cast<size_t>(level)].tokens == 0) continue;
            tokens += levels_[static_cast<size_t>(level)].tokens;
            accepted += levels_[static_cast<size_t>(level)].accepted;
            longest = std::max(longest, levels_[static_cast<size_t>(level)].longest);
            const int sampled = pads_rows ? num_rows * (1 + longest) : num_rows + tokens;
            const double drafted = cost.seconds({num_rows + tokens, sampled}, true);
            const double seconds = std::max(drafted, plain);  // an unseen kind of step is taken as free, and so tried
            if (seconds <= 0.0) return 0.0f;
            const double rate = (num_rows + accepted) / seconds;
            if (rate > best_rate) {
                best_rate = rate;
                best = static_cast<float>(level) / kLevels;
            }
        }
        return best;
    }

    static int level_of(float likelihood) { return std::min(kLevels - 1, static_cast<int>(likelihood * kLevels)); }

  private:
    static constexpr int kLevels = 64;
    static constexpr double kMargin = 1.06;  // drafting has to win by this much: estimates are noisy

    struct Level {
        int tokens = 0;
        double accepted = 0.0;
        int longest = 0;
    };

    std::array<Level, kLevels> levels_{};
};

}  // namespace rhyme
