// What does an engine step cost, as a function of the tokens it schedules and of those that sampling works on? Learnt
// online from the steps themselves.
//
// Sampling may work on more tokens than are scheduled (rows are padded to the longest draft); each of these has one price,
// learnt from what steps take beyond the cost of their scheduled tokens.
//
// Steps with and without drafts are kept apart, because sampling a drafted batch has a price of its own. Each half
// octave of token counts keeps a forgetting mean, which starts from the fastest of the first steps and is cut off at a
// multiple of itself: a stall (warm-up, a busy machine, an engine that was paused) must not decide about drafting for
// good. Between them the cost is interpolated, beyond the largest it goes on with the last slope, and it never falls with
// more tokens: where a larger step was seen to cost less, the smaller one was held up. What a drafted step costs more than
// smaller ones is forgotten while none of its size is seen, so a size that seemed too slow is tried again. Time is
// passed in: there is no clock here.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

namespace rhyme {

struct StepSize {
    int tokens = 0;   // scheduled: one a row, and the drafts
    int sampled = 0;  // that sampling works on; no fewer

    static StepSize undrafted(int num_rows) { return {num_rows, num_rows}; }
};

class StepCost {
  public:
    void observe(StepSize size, bool drafted, double seconds) {
        const int num_tokens = size.tokens;
        const int padding = size.sampled - size.tokens;
        if (padding > 0 && num_tokens >= smallest_drafted_) learn_padding(num_tokens, padding, seconds);
        seconds = std::max(0.0, seconds - padding * padding_seconds_);
        Bucket& bucket = tables_[drafted][bucket_of(num_tokens)];
        // What is less than was believed is believed: a stall only adds.
        const double weight = seconds < bucket.seconds ? std::max(kForgetting, 1.0 - memory_of(bucket)) : kForgetting;
        if (drafted) age(num_tokens);
        bucket.unseen = 0;
        bucket.count += 1;
        bucket.tokens += std::max(1.0 / bucket.count, kForgetting) * (num_tokens - bucket.tokens);
        if (bucket.count == 1) {
            bucket.seconds = seconds;
        } else if (bucket.count <= kTrustedSteps) {
            bucket.seconds = std::min(bucket.seconds, seconds);
        } else {
            bucket.seconds += weight * (std::min(seconds, kOutlier * bucket.seconds) - bucket.seconds);
        }
        fit(tables_[drafted], drafted);
        if (drafted && bucket.count >= kTrustedSteps) smallest_drafted_ = std::min(smallest_drafted_, num_tokens);
    }

    // Expected seconds of a step with this many tokens; 0 if nothing is known. A drafted step smaller than any seen often
    // enough is taken to cost what an undrafted one does, so that drafting is tried, at first and when a batch shrinks.
    double seconds(StepSize size, bool drafted) const {
        const double scheduled = scheduled_seconds(size.tokens, drafted);
        return scheduled > 0.0 ? scheduled + (size.sampled - size.tokens) * padding_seconds_ : 0.0;
    }

    // Whether undrafted steps of about this size (within a factor of two) have been seen often enough to compare with.
    bool knows_undrafted(int num_tokens) const {
        int count = 0;
        for (const Bucket& bucket : tables_[false]) {
            if (2.0 * bucket.tokens >= num_tokens && bucket.tokens <= 2.0 * num_tokens) count += bucket.count;
        }
        return count >= kComparableSteps;
    }

  private:
    double scheduled_seconds(int num_tokens, bool drafted) const {
        if (drafted && num_tokens < smallest_drafted_) return scheduled_seconds(num_tokens, false);
        double last_tokens = 0.0, last_seconds = 0.0, slope = 0.0;
        for (const Bucket& bucket : tables_[drafted]) {
            if (!is_known(bucket, drafted)) continue;
            const double now = bucket.fitted;
            if (last_tokens > 0.0) slope = (now - last_seconds) / (bucket.tokens - last_tokens);
            if (num_tokens <= bucket.tokens) {
                return last_tokens > 0.0 ? last_seconds + slope * (num_tokens - last_tokens) : now;
            }
            last_tokens = bucket.tokens;
            last_seconds = now;
        }
        return last_seconds + slope * (num_tokens - last_tokens);
    }

    // One step of normalised least mean squares: the price moves towards what this step says, the more so the more
    // padding it had compared with others.
    void learn_padding(int num_tokens, int padding, double seconds) {
        const double expected = scheduled_seconds(num_tokens, true) + padding * padding_seconds_;
        const double excess = std::min(seconds, kOutlier * expected) - expected;
        const double square = static_cast<double>(padding) * padding;
        mean_square_ += kForgetting * (square - mean_square_);
        padding_seconds_ = std::max(0.0, padding_seconds_ + kForgetting * excess * padding / (mean_square_ + square));
    }

    static constexpr int kComparableSteps = 3;
    static constexpr int kBuckets = 40;          // up to 2**20 tokens
    static constexpr int kTrustedSteps = 4;      // of which the fastest starts a bucket's mean
    static constexpr double kOutlier = 2.0;      // times the mean
    static constexpr double kForgetting = 0.1;   // weight of the newest step
    static constexpr double kComparable = 4.0;   // times the tokens of a step
    static constexpr double kHalfLife = 512.0;  // drafted steps after which an unseen size is forgotten, half in as many

    struct Bucket {
        int count = 0;
        double tokens = 0.0;
        double seconds = 0.0;
        double fitted = 0.0;  // no more than any larger step costs, and forgotten with age
        int unseen = 0;  // drafted steps since, of sizes not much smaller
    };
    using Table = std::array<Bucket, kBuckets>;

    static bool is_known(const Bucket& bucket, bool drafted) { return bucket.count >= (drafted ? kTrustedSteps : 1); }

    // How much of a bucket's cost is still believed, in (0, 1].
    static double memory_of(const Bucket& bucket) { return std::exp2(-std::max(0.0, bucket.unseen / kHalfLife - 1.0)); }

    // A step that was drafted shows that others of up to a few times its tokens were not chosen.
    void age(int num_tokens) {
        for (Bucket& bucket : tables_[true]) bucket.unseen += bucket.tokens <= kComparable * num_tokens;
    }

    static void fit(Table& table, bool drafted) {
        double least = HUGE_VAL;
        for (auto bucket = table.rbegin(); bucket != table.rend(); ++bucket) {
            if (!is_known(*bucket, drafted)) continue;
            least = std::min(least, bucket->seconds);
            bucket->fitted = least;
        }
        const Bucket* smaller = nullptr;
        for (Bucket& bucket : table) {
            if (!is_known(bucket, drafted)) continue;
            if (smaller != nullptr) bucket.fitted -= (bucket.fitted - smaller->fitted) * (1.0 - memory_of(bucket));
            smaller = &bucket;
        }
    }

    static size_t bucket_of(int num_tokens) {
        const int half_octave = static_cast<int>(2.0 * std::log2(std::max(1, num_tokens)));
        return static_cast<size_t>(std::min(half_octave, kBuckets - 1));
    }

    std::array<Table, 2> tables_;  // [drafted]
    int smallest_drafted_ = 1 << 30;
    double padding_seconds_ = 0.0;  // of a token that is sampled, but not scheduled
    double mean_square_ = 0.0;      // of the paddings seen
};

}  // namespace rhyme
