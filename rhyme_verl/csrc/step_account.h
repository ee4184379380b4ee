// Accounts for engine steps: updates the learnt cost and the running totals. The caller passes the time.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "step_cost.h"

namespace rhyme {

struct DraftStats {
    // Drafts are grouped by where in the answer they begin, in ranges that start at 0, 64, 128, 256, ... tokens.
    static constexpr size_t kRanges = 16;
    static constexpr size_t kFirstRange = 64;
    static constexpr int kBins = 10;  // equal ranges of predicted acceptance in [0, 1]

    int64_t num_steps = 0;  // request-steps: one per row and forward pass
    int64_t num_generated_tokens = 0;
    int64_t num_drafts = 0;  // verified drafts of at least one token
    int64_t num_draft_tokens = 0;
    int64_t num_accepted_tokens = 0;
    double saved_seconds = 0.0;  // estimate: time of undrafted steps for the accepted tokens, less the drafts' cost
    std::array<int64_t, kRanges> draft_tokens_by_place{};
    std::array<int64_t, kRanges> accepted_tokens_by_place{};
    // Verified tokens whose predecessors in the draft were all accepted, grouped by their predicted acceptance.
    std::array<int64_t, kBins> tokens_by_prediction{};
    std::array<int64_t, kBins> accepted_by_prediction{};
    std::array<double, kBins> sum_by_prediction{};  // sum of the predicted acceptance

    // Counts a verified draft that began at token `place` of its answer.
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
        return std::min<size_t>(kRanges - 1, static_cast<size_t>(std::bit_width(place / kFirstRange)));
    }
};

class StepAccount {
  public:
    static constexpr int kAsBegun = -1;

    const StepCost& cost() const { return cost_; }
    StepCost& cost() { return cost_; }

    // Ends the step that was begun. `tokens`: all that were scheduled in it, or kAsBegun.
    void end(double now, int tokens) {
        // Prompts that are prefilled come on top, and requests that have ended are missing.
        const int others = tokens == kAsBegun ? 0 : tokens - step_.size.tokens;
        const bool is_about_prompts = (step_.drafted ? kMostOthers : 1) * others > step_.size.tokens;
        if (step_.size.tokens == 0 || tokens == 0 || is_about_prompts) return;
        cost_.observe({step_.size.tokens + others, step_.size.sampled + others}, step_.drafted, now - step_.started);
    }

    // Returns the seconds that drafts saved in the step that has ended, in which `num_rows` rows were verified.
    double saving(int num_rows, int64_t accepted, double now) const {
        if (!step_.drafted || step_.size.tokens == 0 || num_rows == 0) return 0.0;
        // Take the expected or the measured time, whichever is less, so that a stall, now or in the table, does not count
        // as a cost. A step without its drafts cannot cost more than with them.
        const double drafted = std::min(cost_.seconds(step_.size, true), now - step_.started);
        const double plain = std::min(cost_.seconds(StepSize::undrafted(num_rows), false), drafted);
        if (plain <= 0.0) return 0.0;  // nothing to compare with
        return plain * static_cast<double>(num_rows + accepted) / num_rows - drafted;
    }

    void begin(StepSize size, bool drafted, double now) {
        if (drafted && !step_.drafted) {  // chosen, or tried because it was time to
            retry_drafted_ = is_retry() ? std::min(2 * retry_drafted_, kMostRetryDrafted) : kRetryDrafted;
        }
        steps_of_a_kind_ = drafted == step_.drafted ? steps_of_a_kind_ + 1 : 0;
        step_ = {now, size, drafted};
    }

    // The step that was begun has been launched at `at`. One without drafts would not have waited for the tokens before it,
    // so its time counts from there.
    void launched(double at) {
        if (step_.drafted) {
            cost_.observe_wait(step_.size.tokens, at - step_.started);
        } else {
            step_.started = at;
        }
    }

    // Learns nothing from the time of the step that was begun.
    void disregard() { step_.size = {}; }

    // Whether it is time for a step of the other kind (drafted or undrafted), which refreshes that kind's cost.
    bool is_retry() const { return steps_of_a_kind_ >= (step_.drafted ? kRetryUndrafted : retry_drafted_); }
    bool drafted_last() const { return step_.drafted; }

  private:
    // After this many undrafted steps in a row; twice as many after each retry until drafts are chosen again.
    static constexpr int kRetryDrafted = 32, kMostRetryDrafted = 256;
    static constexpr int kRetryUndrafted = 128;  // after this many drafted steps in a row
    // A drafted step is observed with prompts of up to a quarter of its tokens, and an undrafted one with prompts of up to as
    // many tokens as it has rows: there may be no other steps, and StepCost::knows_undrafted compares within a factor of two.
    static constexpr int kMostOthers = 4;

    struct Step {  // the step that runs between two calls of Drafter::draft()
        double started = 0.0;
        StepSize size;  // of its decoding rows
        bool drafted = false;
    };

    StepCost cost_;
    Step step_;
    int retry_drafted_ = kRetryDrafted;
    int steps_of_a_kind_ = 0;  // consecutive steps of the newest step's kind, less one
};

}  // namespace rhyme
