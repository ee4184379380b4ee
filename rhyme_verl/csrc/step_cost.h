// Learns online what an engine step costs, as a function of its scheduled tokens and of the tokens that sampling works on.
//
// What is learnt: the seconds of a step by its number of scheduled tokens, separately for steps with and without drafts,
// because sampling a drafted batch has a price of its own; and one price per padding token. The caller passes the time.
//
// Ranges and curve: on an accelerator the cost is nearly flat, with jumps where kernels take the next larger tile (just
// above 128, 256, 512 tokens). Steps are therefore grouped into narrow ranges of sizes, each with a forgetting mean. A
// fitted curve shares strength between ranges: it is the nearest one to their means that never falls with more tokens,
// where frequent and recent ranges count most. Between ranges it is linear; beyond the largest range its last slope
// continues.
//
// Padding: where rows are padded to the longest draft, sampling works on more tokens than are scheduled. The price of a
// padding token is the slope of seconds over padding among drafted steps of the same range, so that a step which is slow
// for another reason does not pass for padding. The slope is reduced by its standard error, and bounded by 0 and by the
// mean seconds per sampled token. The padding's share of a range's mean is taken out before the curve is fitted.
//
// Stalls (warm-up, a busy machine, a paused engine) must not end drafting for good: a young mean starts anew when a step
// takes less than half of it, a slow step counts as at most a multiple of the mean, and a range with few steps counts as at
// most slightly slower than any larger one. Old values: a drafted size that is not chosen ages. What it costs more than smaller sizes
// decays, so that it is tried again; the older its mean, the more it follows a faster step.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace rhyme {

struct StepSize {
    int tokens = 0;  // scheduled: one per row, plus the drafts
    int sampled = 0;  // that sampling works on, padding included; at least `tokens`

    static StepSize undrafted(int num_rows) { return {num_rows, num_rows}; }
};

class StepCost {
  public:
    void observe(StepSize size, bool drafted, double seconds) {
        if (!(seconds > 0.0)) return;  // a clock that does not advance says nothing
        // Drafted ranges of up to a few times the step's tokens age, because the step was chosen instead of them.
        for (Range& one : tables_[true]) one.unseen += one.tokens <= kComparable * size.tokens;
        Range& range = tables_[drafted][range_of(size.tokens)];
        const double padding = size.sampled - size.tokens;
        const double forgotten = 1.0 - memory_of(range);
        range.unseen = 0;
        range.last_step = ++num_steps_;
        range.count += 1;
        range.tokens += std::max(1.0 / range.count, kForgetting) * (size.tokens - range.tokens);
        const bool is_young = range.count <= kTrustedSteps;
        if (range.count == 1 || (is_young && kOutlier * seconds < range.seconds)) {  // the earlier steps were stalled
            range.seconds = seconds;
            range.padding = padding;
        } else {
            const double more = std::max(0.0, padding - range.padding) * padding_seconds_;
            seconds = std::min(seconds, kOutlier * (range.seconds + more));
            if (drafted && !is_young) {
                learn_padding(padding - range.padding, seconds - range.seconds, seconds / size.sampled);
            }
            double weight = std::max(1.0 / range.count, kForgetting);
            if (seconds < range.seconds) weight = std::max(weight, forgotten);  // a stall only adds time
            range.seconds += weight * (seconds - range.seconds);
            range.padding += weight * (padding - range.padding);
        }
        fit(drafted);
    }

    // Notes how long a drafted step of this many tokens has waited for the tokens before it and for its drafts, where an
    // undrafted one would not have waited.
    void observe_wait(int num_tokens, double seconds) {
        const double weight = wait_tokens_ == 0.0 ? 1.0 : kForgetting;
        wait_tokens_ += weight * (num_tokens - wait_tokens_);
        wait_seconds_ += weight * (std::max(0.0, seconds) - wait_seconds_);
    }

    // Returns the expected seconds of a step, or 0 if unknown. Without a drafted step that was seen often enough, drafts are
    // expected to cost what rows cost, and the wait, so that drafting is tried at first. A drafted step that is smaller than any seen is
    // expected to cost as much as an undrafted one of its size, or something between the two.
    double seconds(StepSize size, bool drafted) const {
        const double scheduled = scheduled_seconds(size.tokens, drafted);
        return scheduled > 0.0 ? scheduled + (size.sampled - size.tokens) * padding_seconds_ : 0.0;
    }

    // Whether undrafted steps of this size, within a factor of two, have been seen often enough to compare with.
    bool knows_undrafted(int num_tokens) const {
        int count = 0;
        for (const Range& range : tables_[false]) {
            if (2.0 * range.tokens >= num_tokens && range.tokens <= 2.0 * num_tokens) count += range.count;
        }
        return count >= kComparableSteps;
    }

    bool is_finite() const {
        bool all = std::isfinite(wait_tokens_ + wait_seconds_ + padding_seconds_ + padding_square_ + padding_product_ +
                                 seconds_square_ + most_padding_seconds_);
        for (const Curve& curve : curves_) {
            for (const Knot& knot : curve) all &= std::isfinite(knot.tokens + knot.seconds);
        }
        return all;
    }

  private:
    static constexpr int kComparableSteps = 3;  // undrafted steps that are enough to compare with
    static constexpr int kTrustedSteps = 4;  // from which on a range's mean is trusted
    static constexpr double kNear = 1.25;  // sizes within this factor are about the same
    static constexpr double kOutlier = 2.0;  // bound on a step's seconds, times the mean
    static constexpr double kLeastOfSmallest = 0.5;  // of the smallest known step's seconds, for any smaller one
    static constexpr double kLeastShare = 0.2;  // of a range's seconds that is never attributed to padding
    static constexpr double kRecentSteps = 256.0;  // steps in which a range's weight in the curve halves
    static constexpr double kForgetting = 0.1;  // least weight of the newest step in a mean
    static constexpr double kPaddingSteps = 200.0;  // over which the padding's price is averaged
    static constexpr double kComparable = 4.0;  // a step ages drafted ranges of up to this many times its tokens
    static constexpr int kMostSteps = 16;  // bound on a range's weight in the curve
    static constexpr double kNoise = 1.1;  // factor by which a smaller step may appear slower than a larger one
    static constexpr double kHalfLife = 512.0;  // unseen steps before a drafted range's cost decays, and its half-life

    // The host's work between the arrival of tokens and the launch takes as long as for this many tokens, plus its tokens:
    // 0.45 ms at 5 tokens, 0.6 ms at 45, 1.0 ms at 117 (benchmarks/engines/virtual_time.py).
    static constexpr double kWaitTokens = 64.0;

    // A range has one size up to 32 tokens, 8 sizes up to 256, 32 up to 1,024, and a quarter of an octave beyond.
    static constexpr int kSingle = 32, kNarrow = 256, kWide = 1024;
    static constexpr int kNarrowWidth = 8, kWideWidth = 32;
    static constexpr size_t kNarrowFirst = kSingle, kWideFirst = kNarrowFirst + (kNarrow - kSingle) / kNarrowWidth;
    static constexpr size_t kOctavesFirst = kWideFirst + (kWide - kNarrow) / kWideWidth;
    static constexpr size_t kRanges = kOctavesFirst + 40;

    struct Range {
        int count = 0;
        double tokens = 0.0;  // mean of its steps
        double seconds = 0.0;  // mean of its steps
        double padding = 0.0;  // mean of its steps: sampled tokens beyond the scheduled ones
        int unseen = 0;  // steps since its last one, of sizes that are not much smaller
        int64_t last_step = 0;
    };
    struct Knot {  // of the fitted curve
        double tokens;
        double seconds;
    };
    using Curve = std::vector<Knot>;
    using Table = std::array<Range, kRanges>;

    static size_t range_of(int num_tokens) {
        if (num_tokens <= kSingle) return static_cast<size_t>(std::max(1, num_tokens) - 1);
        if (num_tokens <= kNarrow) return kNarrowFirst + static_cast<size_t>((num_tokens - kSingle - 1) / kNarrowWidth);
        if (num_tokens <= kWide) return kWideFirst + static_cast<size_t>((num_tokens - kNarrow - 1) / kWideWidth);
        const auto octaves = static_cast<size_t>(4.0 * std::log2(static_cast<double>(num_tokens) / kWide));
        return std::min(kOctavesFirst + octaves, kRanges - 1);
    }

    // Returns a range's seconds without padding, or 0 if it and the ranges of about its size have too few steps. A single
    // step may have stalled, so a range with few steps takes the fastest mean among the ranges of about its size.
    double known_seconds(size_t i, bool drafted) const {
        const Table& table = tables_[drafted];
        const Range& range = table[i];
        if (range.count == 0) return 0.0;
        if (range.count >= kTrustedSteps || !drafted) return without_padding(range);
        int count = 0;
        double fastest = without_padding(range);
        const auto take = [&](const Range& near) {
            if (near.count == 0) return true;
            if (near.tokens * kNear < range.tokens || near.tokens > kNear * range.tokens) return false;
            count += near.count;
            fastest = std::min(fastest, without_padding(near));
            return true;
        };
        size_t first = i + 1, last = i + 1;  // bounds of the ranges of about its size
        while (first > 0 && take(table[first - 1])) --first;
        while (last < kRanges && take(table[last])) ++last;
        return count >= kTrustedSteps ? fastest : 0.0;
    }

    // Returns how much of a range's cost is still trusted, in (0, 1].
    static double memory_of(const Range& range) { return std::exp2(-std::max(0.0, range.unseen / kHalfLife - 1.0)); }

    // Fits the curve that never falls and is nearest to the ranges' means (pool adjacent violators). A range's weight grows
    // with its steps, up to kMostSteps, and halves in every kRecentSteps steps without one.
    void fit(bool drafted) {
        struct Block {
            double seconds, weight;
            size_t first;
        };
        std::array<Block, kRanges> blocks;
        size_t num_blocks = 0;
        Curve& curve = curves_[drafted];
        curve.clear();
        std::array<double, kRanges> known, least;  // seconds of a range; minimum over it and all larger ones
        double smallest = HUGE_VAL;
        for (size_t i = kRanges; i-- > 0;) {
            known[i] = known_seconds(i, drafted);
            if (known[i] > 0.0) smallest = std::min(smallest, known[i]);
            least[i] = smallest;
        }
        double below = 0.0;
        for (size_t i = 0; i < kRanges; ++i) {
            const Range& range = tables_[drafted][i];
            if (known[i] == 0.0) continue;
            double seconds = known[i];
            if (range.count < kMostSteps) seconds = std::min(seconds, kNoise * least[i]);  // few, slower steps have stalled
            if (!curve.empty() && seconds > below) seconds = below + (seconds - below) * memory_of(range);
            below = seconds;
            const double recency = std::exp2(static_cast<double>(range.last_step - num_steps_) / kRecentSteps);
            blocks[num_blocks++] = {seconds, std::max(1e-6, std::min(range.count, kMostSteps) * recency), curve.size()};
            curve.push_back({range.tokens, seconds});
            while (num_blocks > 1 && blocks[num_blocks - 2].seconds > blocks[num_blocks - 1].seconds) {
                const Block last = blocks[--num_blocks];
                Block& merged = blocks[num_blocks - 1];
                const double weight = merged.weight + last.weight;
                merged.seconds = (merged.seconds * merged.weight + last.seconds * last.weight) / weight;
                merged.weight = weight;
            }
        }
        if (drafted && !curve.empty()) smallest_drafted_ = std::min(smallest_drafted_, static_cast<int>(curve[0].tokens));
        for (size_t b = 0; b < num_blocks; ++b) {
            const size_t end = b + 1 < num_blocks ? blocks[b + 1].first : curve.size();
            for (size_t i = blocks[b].first; i < end; ++i) curve[i].seconds = blocks[b].seconds;
        }
    }

    double scheduled_seconds(int num_tokens, bool drafted) const {
        const Curve& curve = curves_[drafted];
        if (drafted && num_tokens < smallest_drafted_) {
            const double plain = scheduled_seconds(num_tokens, false);
            const Curve& undrafted = curves_[false];
            if (undrafted.empty()) return plain;
            const double waited = plain + wait_seconds_ * (kWaitTokens + num_tokens) / (kWaitTokens + wait_tokens_);
            if (curve.empty()) return waited;
            const Knot &left = undrafted.back(), &right = curve.front();
            const double least = std::min(waited, std::max(plain, right.seconds));
            if (num_tokens <= left.tokens || right.tokens <= left.tokens) return least;
            const double share = (num_tokens - left.tokens) / (right.tokens - left.tokens);
            return std::max(least, left.seconds + share * std::max(0.0, right.seconds - left.seconds));
        }
        if (curve.empty()) return 0.0;
        const auto begin = curve.begin(), end = curve.end();
        const auto right = std::ranges::lower_bound(begin, end, static_cast<double>(num_tokens), {}, &Knot::tokens);
        // Beyond the outer knots, take the slope up to twice or half their size: two knots alone are too noisy.
        if (right == begin) {
            const auto far = std::ranges::upper_bound(begin, end, 2.0 * begin->tokens, {}, &Knot::tokens) - 1;
            if (far == begin) return begin->seconds;
            const double slope = (far->seconds - begin->seconds) / (far->tokens - begin->tokens);
            return std::max(kLeastOfSmallest * begin->seconds, begin->seconds - slope * (begin->tokens - num_tokens));
        }
        const auto last = right == end ? end - 1 : right;
        const auto left =
            right == end ? std::ranges::lower_bound(begin, last, 0.5 * last->tokens, {}, &Knot::tokens) : right - 1;
        if (last == left) return last->seconds;
        const double slope = (last->seconds - left->seconds) / (last->tokens - left->tokens);
        return last->seconds + slope * (num_tokens - last->tokens);
    }

    // Updates the price of a padding token: the least-squares slope of seconds over padding, less its standard error.
    // `padding` and `seconds` are the step's, less the means of its range. The mean of `most`, the step's seconds per
    // sampled token, bounds the price.
    void learn_padding(double padding, double seconds, double most) {
        padding_steps_ = std::min(padding_steps_ + 1.0, kPaddingSteps);
        const auto learn = [this](double& mean, double value) { mean += (value - mean) / padding_steps_; };
        learn(padding_square_, padding * padding);
        learn(padding_product_, padding * seconds);
        learn(seconds_square_, seconds * seconds);
        learn(most_padding_seconds_, most);
        if (padding_square_ == 0.0) return;
        const double error = std::sqrt(seconds_square_ / (padding_square_ * padding_steps_));
        padding_seconds_ = std::clamp(padding_product_ / padding_square_ - error, 0.0, most_padding_seconds_);
    }

    // Returns a range's seconds without those of its padding.
    double without_padding(const Range& range) const {
        return std::max(kLeastShare * range.seconds, range.seconds - range.padding * padding_seconds_);
    }

    std::array<Table, 2> tables_;  // [drafted]
    std::array<Curve, 2> curves_;  // [drafted]
    int smallest_drafted_ = 1 << 30;
    double wait_tokens_ = 0.0;  // mean over drafted steps that have waited
    double wait_seconds_ = 0.0;  // mean over them
    int64_t num_steps_ = 0;
    double padding_seconds_ = 0.0;  // price of a token that is sampled but not scheduled
    double padding_square_ = 0.0;  // means over steps, relative to their range's means: padding squared,
    double padding_product_ = 0.0;  // padding times seconds,
    double seconds_square_ = 0.0;  // and seconds squared
    double most_padding_seconds_ = 0.0;
    double padding_steps_ = 0.0;  // number of steps in these means
};

}  // namespace rhyme
