// Predicts the next token and its likelihood from contexts of many lengths, and learns which of them to trust.
//
// Every kind of context is an expert that reports how often each candidate followed. An adaptive table turns each report
// (how often the context was seen, and the candidate's share) into a probability. A logistic mixer combines the experts'
// log-odds with the score of a log-bilinear model; its weights depend on the longest known context and on the previous
// token. A last table turns the sum, that context and the lead over the runner-up into the likelihood that the token is
// accepted. Everything is learnt online from the tokens that the model generates. This is context mixing as in data
// compression (M. Mahoney's PAQ). Not thread-safe: threads may predict concurrently only while none learns.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "experts.h"
#include "log_bilinear.h"
#include "tokens.h"

// Compiles a function a second time for CPUs with wider registers (AVX2). Which version runs is decided when the library is
// loaded.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define RHYME_WIDE __attribute__((target_clones("arch=haswell", "default")))
#else
#define RHYME_WIDE
#endif

namespace rhyme {

// A prediction, with what is needed to learn from the token that then comes.
struct Prediction {
    static constexpr size_t kLearnt = 2;  // candidates that are learnt from: the most likely one and its rival

    Token token() const { return tokens[0]; }

    float probability = 0.0f;  // that the most likely candidate comes
    uint16_t outcome = 0;  // index into Mixer::outcomes_
    uint8_t level = 0;  // of the sum of log-odds; index into Mixer::by_level_
    uint8_t longest = 0;  // known context; it and the previous token select the weights
    uint8_t num_learnt = 0;
    std::array<Token, kLearnt> tokens;
    std::array<float, kLearnt> scores;  // of the log-bilinear model
    std::array<std::array<uint16_t, kNumExperts>, kLearnt> opinions;  // indices into Mixer::opinions_
    LogBilinear::Context context;
};

class Mixer {
  public:
    Mixer() {
        for (int i = 0; i < kLogOdds; ++i) {
            const double p = (i + 0.5) / kLogOdds;
            log_odds_[static_cast<size_t>(i)] = static_cast<float>(std::log(p / (1.0 - p)));
        }
        for (Weights& selected : by_longest_) selected.fill(kFirstWeight);
        for (size_t i = 0; i < opinions_.size(); ++i) {
            // The initial value is the candidate's share, reduced where the context is rare.
            const size_t share = i % kShares, seen = i / kShares % kTotals;
            const size_t pair = (share - 1) / 2;
            const float said = share == 0 ? 0.02f : (static_cast<float>(pair) + 0.5f) / 9.0f;
            const float trust = static_cast<float>(seen + 1) / (kTotals + 1);
            opinions_[i].rate.p = std::clamp(trust * said + (1.0f - trust) * 0.3f * said, 0.005f, 0.98f);
            opinions_[i].log_odds = log_odds(opinions_[i].rate.p);
        }
        for (size_t i = 0; i < outcomes_.size(); ++i) {
            const size_t level = i / kLeads % kSums;
            const float sum = (static_cast<float>(level) + 0.5f) / kSumSteps - kLeastSum;
            outcomes_[i].p = by_level_[level].p = std::clamp(squash(sum), 0.02f, 0.98f);
        }
    }

    // Writes the most likely candidate after `context` to `result`. `evidence` must have at least one candidate.
    RHYME_WIDE void mix(const Evidence& evidence, const LogBilinear::Context& context, Prediction& result) const {
        const size_t count = evidence.num_candidates;
        result.context = context;
        result.longest = static_cast<uint8_t>(evidence.longest());
        const Weights weights = weights_of(result);
        const LogBilinear::Hidden hidden = bilinear_.hidden_of(context);
        std::array<float, Evidence::kCandidates> scores, sums;
        for (size_t c = 0; c < count; ++c) {
            scores[c] = bilinear_.score(hidden, evidence.tokens[c]);
            sums[c] = weights[kNumExperts] * scores[c];
        }
        std::array<std::array<uint16_t, kNumExperts>, Evidence::kCandidates> opinions;
        for (size_t expert = 0; expert < kNumExperts; ++expert) {
            const int total = evidence.totals[expert];
            if (total == 0) {
                for (size_t c = 0; c < count; ++c) opinions[c][expert] = kNone;
                continue;
            }
            const auto& counts = evidence.counts[expert];
            const int most = *std::max_element(counts.begin(), counts.begin() + count);
            const size_t first = (expert * kTotals + octave_of(total)) * kShares;
            for (size_t c = 0; c < count; ++c) {
                const int times = counts[c];
                const size_t share =
                    times == 0 ? 0 : 1 + 2 * static_cast<size_t>(std::min(8, 8 * times / total)) + (times == most);
                opinions[c][expert] = static_cast<uint16_t>(first + share);
                sums[c] += weights[expert] * opinions_[first + share].log_odds;
            }
        }
        std::array<size_t, Evidence::kCandidates> order{};
        for (size_t c = 0; c < count; ++c) order[c] = c;
        const size_t kept = std::min(count, Prediction::kLearnt);
        std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(kept),
                          order.begin() + static_cast<std::ptrdiff_t>(count),
                          [&](size_t a, size_t b) { return sums[a] > sums[b]; });
        result.num_learnt = static_cast<uint8_t>(kept);
        for (size_t i = 0; i < kept; ++i) {
            result.tokens[i] = evidence.tokens[order[i]];
            result.scores[i] = scores[order[i]];
            result.opinions[i] = opinions[order[i]];
        }
        const float best = sums[order[0]];
        const float lead = count > 1 ? best - sums[order[1]] : kNoRival;
        result.level = static_cast<uint8_t>(level_of(best));
        result.outcome = outcome_of(result.longest, result.level, lead);
        // A rarely seen outcome is drawn towards the rate of all outcomes with the same sum.
        const Rate& outcome = outcomes_[result.outcome];
        const float trust = outcome.seen / (outcome.seen + kTrusted);
        result.probability = trust * outcome.p + (1.0f - trust) * by_level_[result.level].p;
    }

    // Learns that `truth` came where `prediction` was made.
    RHYME_WIDE void learn(const Prediction& prediction, Token truth) {
        const bool is_right = prediction.token() == truth;
        outcomes_[prediction.outcome].learn(is_right, kOutcomeMemory);
        by_level_[prediction.level].learn(is_right, kOutcomeMemory);
        const Weights weights = weights_of(prediction);
        Weights change{};
        for (size_t i = 0; i < prediction.num_learnt; ++i) {
            const bool came = prediction.tokens[i] == truth;
            Weights said{};
            for (size_t expert = 0; expert < kNumExperts; ++expert) {
                const uint16_t opinion = prediction.opinions[i][expert];
                if (opinion != kNone) said[expert] = opinions_[opinion].log_odds;
            }
            said[kNumExperts] = prediction.scores[i];
            float sum = 0.0f;
            for (size_t input = 0; input < said.size(); ++input) sum += weights[input] * said[input];
            const float step = kLearningRate * ((came ? 1.0f : 0.0f) - squash(sum));
            for (size_t input = 0; input < said.size(); ++input) change[input] += step * said[input];
            for (const uint16_t opinion : prediction.opinions[i]) {
                if (opinion == kNone) continue;
                opinions_[opinion].rate.learn(came, kOpinionMemory);
                opinions_[opinion].log_odds = log_odds(opinions_[opinion].rate.p);
            }
        }
        Weights& by_longest = by_longest_[prediction.longest];
        Weights& by_previous = by_previous_[prediction.context[0] % kPrevious];
        for (size_t input = 0; input < change.size(); ++input) {
            by_longest[input] += change[input];
            by_previous[input] += change[input];
        }
        bilinear_.learn(prediction.context, {prediction.tokens.data(), prediction.num_learnt}, truth);
    }

    const char* check_integrity() const {
        const auto is_probability = [](const Rate& rate) { return rate.p > 0.0f && rate.p < 1.0f; };
        if (!std::ranges::all_of(opinions_, is_probability, &Opinion::rate)) return "an opinion is not a probability";
        if (!std::ranges::all_of(outcomes_, is_probability)) return "an outcome is not a probability";
        if (!std::ranges::all_of(by_level_, is_probability)) return "the rate of a level is not a probability";
        const auto are_finite = [](const Weights& weights) {
            return std::ranges::all_of(weights, [](float weight) { return std::isfinite(weight); });
        };
        if (!std::ranges::all_of(by_longest_, are_finite)) return "a weight is not finite";
        if (!std::ranges::all_of(by_previous_, are_finite)) return "a weight is not finite";
        return bilinear_.is_finite() ? "" : "the log-bilinear model is not finite";
    }

  private:
    static constexpr uint16_t kNone = UINT16_MAX;  // opinion of an expert that does not know the context
    static constexpr size_t kTotals = 6;  // octaves of the number of times that a context was seen
    static constexpr size_t kShares = 19;  // 0, or one of nine shares, each the largest or not
    static constexpr int kSums = 24;
    static constexpr float kSumSteps = 2.0f;  // levels per unit of log-odds
    static constexpr float kLeastSum = 4.0f;  // levels start at minus this sum
    static constexpr int kLeads = 8;
    static constexpr float kNoRival = 1e9f;
    static constexpr size_t kPrevious = 256;
    static constexpr float kFirstWeight = 0.3f;
    static constexpr float kLearningRate = 0.002f;
    static constexpr float kOpinionMemory = 300.0f;
    static constexpr float kOutcomeMemory = 400.0f;
    static constexpr float kTrusted = 40.0f;  // an outcome seen this often counts half
    static constexpr int kLogOdds = 4096;

    using Weights = std::array<float, kNumExperts + 1>;  // of the experts and the log-bilinear model

    struct Rate {
        float p = 0.5f;
        float seen = 0.0f;

        void learn(bool right, float memory) {
            if (seen < memory) seen += 1.0f;
            p += ((right ? 1.0f : 0.0f) - p) / (seen + 1.5f);
        }
    };
    struct Opinion {
        Rate rate;
        float log_odds = 0.0f;  // of the rate
    };

    static size_t octave_of(int total) {
        return std::min(kTotals - 1, static_cast<size_t>(std::bit_width(static_cast<unsigned>(total - 1))));
    }
    static float squash(float sum) { return 1.0f / (1.0f + std::exp(-std::clamp(sum, -20.0f, 20.0f))); }
    float log_odds(float p) const { return log_odds_[static_cast<size_t>(p * (kLogOdds - 1))]; }

    static int level_of(float sum) { return std::clamp(static_cast<int>((sum + kLeastSum) * kSumSteps), 0, kSums - 1); }
    static uint16_t outcome_of(int longest, int level, float lead) {
        const int ahead = lead >= kNoRival ? kLeads - 1 : std::min(kLeads - 2, static_cast<int>(2.0f * lead));
        return static_cast<uint16_t>((longest * kSums + level) * kLeads + ahead);
    }

    Weights weights_of(const Prediction& prediction) const {
        Weights weights = by_longest_[prediction.longest];
        const Weights& more = by_previous_[prediction.context[0] % kPrevious];
        for (size_t input = 0; input < weights.size(); ++input) weights[input] += more[input];
        return weights;
    }

    std::array<Weights, kNumExperts> by_longest_;
    std::array<Weights, kPrevious> by_previous_{};
    std::array<Opinion, kNumExperts * kTotals * kShares> opinions_;
    std::array<Rate, kNumExperts * kSums * kLeads> outcomes_;
    std::array<Rate, kSums> by_level_;
    std::array<float, kLogOdds> log_odds_;
    LogBilinear bilinear_;
};

}  // namespace rhyme
