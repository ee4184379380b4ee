// What engine steps took and gave: keeps the learnt cost and the running totals up to date. Time is passed in.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "step_cost.h"

namespace rhyme {

struct DraftStats {
    // By where in its answer a draft began, in ranges from 0, 64, 128, 256 ... tokens on.
    static constexpr int kRanges = 16;
    static constexpr int kFirstRange = 64;
    static constexpr int kBins = 10;  // of predicted acceptance, in [0, 1]

    int64_t num_steps = 0;  // request-steps: rows of verified forward passes
    int64_t num_generated_tokens = 0;
    int64_t num_drafts = 0;  // verified drafts of at least one token
    int64_t num_draft_tokens = 0;
    int64_t num_accepted_tokens = 0;
    double saved_seconds = 0.0;  // expected: accepted tokens at the cost of undrafted steps, less what drafts cost
    std::array<int64_t, kRanges> draft_tokens_by_place{};
    std::array<int64_t, kRanges> accepted_tokens_by_place{};
    // Of verified tokens whose predecessors in the draft were all accepted, by the acceptance that was predicted.
    std::array<int64_t, kBins> tokens_by_prediction{};
    std::array<int64_t, kBins> accepted_by_prediction{};
    std::array<double, kBins> sum_by_prediction{};  // of predictions

    // A draft that began at `place` was verified.
    void add_draft(size_t place, int drafted, int accepted) {
        num_drafts += 1;
        num_draft_tokens += drafted;
        num_accepted_tokens += accepted;
        draft_tokens_by_place[range_of(place)] += drafted;
        accepted_tokens_by_place[range_of(place)] += accepted;
    }

    void add_prediction(float probability, bool accepted) {
        const auto bin = static_cast<size_t>(std::clamp(static_cast<int>(probability * kBins), 0, kBins - 1));
        tokens_by_prediction[bin] += 1;
        accepted_by_prediction[bin] += accepted;
        sum_by_prediction[bin] += static_cast<double>(probability);
    }

    static size_t range_of(size_t place) {
        int range = 0;
        while (place >= static_cast<size_t>(kFirstRange) && range < kRanges - 1) {
            place /= 2;
            ++range;
        }
        return static_cast<size_t>(range);
    }
};

class StepAccount {
  public:
    const StepCost& cost() const { return cost_; }
    StepCost& cost() { return cost_; }

    // The step that was begun has ended.
    void end(double now) {
        if (step_.decodes_only && step_.size.tokens > 0) cost_.observe(step_.size, step_.drafted, now - step_.started);
    }

    // Seconds that drafts saved in the step that has ended, in which so many rows were verified.
    double saving(int num_rows, int64_t accepted, double now) const {
        if (!step_.drafted || num_rows == 0) return 0.0;
        // What the step was expected to take or what it took, whichever is less: neither a stall now nor one that the table
        // still remembers is to be held for a cost. Nor can a step cost more without its drafts than with them.
        const double drafted = std::min(cost_.seconds(step_.size, true), now - step_.started);
        const double plain = std::min(cost_.seconds(StepSize::undrafted(num_rows), false), drafted);
        if (plain <= 0.0) return 0.0;  // nothing to compare with
        return plain * static_cast<double>(num_rows + accepted) / num_rows - drafted;
    }

    // The next step begins now.
    void begin(StepSize size, bool drafted, bool decodes_only, double now) {
        steps_of_a_kind_ = drafted == step_.drafted ? steps_of_a_kind_ + 1 : 0;
        step_ = {now, size, drafted, decodes_only};
    }

    // A prompt was prefilled in the step that was begun.
    void note_prefill() { step_.decodes_only = false; }

    // Whether it is time for a step of the other kind, which refreshes its cost.
    bool is_retry() const { return steps_of_a_kind_ >= (step_.drafted ? kRetryUndrafted : kRetryDrafted); }
    // Whether the step that was begun last has drafts.
    bool drafted_last() const { return step_.drafted; }

  private:
    static constexpr int kRetryDrafted = 32;  // undrafted steps in a row
    static constexpr int kRetryUndrafted = 128;

    struct Step {  // that runs between two calls of Drafter::draft()
        double started = 0.0;
        StepSize size;
        bool drafted = false;
        bool decodes_only = false;  // no prefill in it, as far as is known
    };

    StepCost cost_;
    Step step_;
    int steps_of_a_kind_ = 0;  // with a draft, or without, in a row
};

}  // namespace rhyme
