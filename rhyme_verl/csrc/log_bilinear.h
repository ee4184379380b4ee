// Scores how well a token follows the sixteen before it: a log-bilinear model (A. Mnih and G. Hinton, 2007) with a bounded
// hidden layer. It learns online from the running requests, by comparing each token with the candidates that were expected.
//
// Counts say nothing about a new context; this model generalises from similar ones. Tokens share a fixed number of bins, so
// its size does not depend on the vocabulary. Not thread-safe: threads may read concurrently only while none learns.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tokens.h"

namespace rhyme {

class LogBilinear {
  public:
    static constexpr size_t kContext = 16;  // tokens
    static constexpr size_t kWidth = 16;  // of the hidden layer
    static constexpr float kMaxScore = 8.0f;

    using Bin = uint16_t;
    using Context = std::array<Bin, kContext>;  // bins of the preceding tokens, the last one first; 0 where there is none
    using Hidden = std::array<float, kWidth>;

    LogBilinear() : inputs_(kContext * kBins), outputs_(kBins) {
        uint32_t state = 1;  // small, distinct weights: equal ones would stay equal
        const auto small = [&state] {
            state = state * 1664525u + 1013904223u;
            return 0.3f * (static_cast<float>(state >> 8) / static_cast<float>(1 << 24) - 0.5f);
        };
        for (Hidden& input : inputs_) std::generate(input.begin(), input.end(), small);
        for (Output& output : outputs_) std::generate(output.weights.begin(), output.weights.end(), small);
    }

    static Bin bin_of(Token token) { return static_cast<Bin>((static_cast<uint32_t>(token) * 2654435769u) >> 20); }

    // `end` points just past the last of `available` tokens.
    static Context context_of(const Token* end, size_t available) {
        Context context{};
        for (size_t i = 0; i < std::min(available, kContext); ++i) context[i] = bin_of(*(end - 1 - i));
        return context;
    }

    Hidden hidden_of(const Context& context) const {
        Hidden hidden{};
        for (size_t i = 0; i < kContext; ++i) {
            const Hidden& input = inputs_[i * kBins + context[i]];
            for (size_t d = 0; d < kWidth; ++d) hidden[d] += input[d];
        }
        for (float& value : hidden) value /= 1.0f + std::fabs(value);
        return hidden;
    }

    // Returns the log-odds that the token comes next, in [-kMaxScore, kMaxScore].
    float score(const Hidden& hidden, Token token) const {
        const Output& output = outputs_[bin_of(token)];
        float sum = output.bias;
        for (size_t d = 0; d < kWidth; ++d) sum += hidden[d] * output.weights[d];
        return std::clamp(sum, -kMaxScore, kMaxScore);
    }

    // Learns that `truth` came after `context`, where the `expected` tokens were candidates.
    void learn(const Context& context, Span<Token> expected, Token truth) {
        const Hidden hidden = hidden_of(context);
        Hidden gradient{};
        bool was_expected = false;
        for (const Token token : expected) {
            was_expected |= token == truth;
            learn_output(hidden, token, token == truth, gradient);
        }
        if (!was_expected) learn_output(hidden, truth, true, gradient);
        for (size_t d = 0; d < kWidth; ++d) {
            const float slope = 1.0f - std::fabs(hidden[d]);
            gradient[d] *= slope * slope;
        }
        for (size_t i = 0; i < kContext; ++i) {
            Hidden& input = inputs_[i * kBins + context[i]];
            for (size_t d = 0; d < kWidth; ++d) input[d] += gradient[d];
        }
    }

    bool is_finite() const {
        const auto is_finite = [](float value) { return std::isfinite(value); };
        const auto are_finite = [&](const Hidden& values) { return std::ranges::all_of(values, is_finite); };
        return std::ranges::all_of(inputs_, are_finite) && std::ranges::all_of(outputs_, are_finite, &Output::weights) &&
               std::ranges::all_of(outputs_, is_finite, &Output::bias);
    }

  private:
    static constexpr size_t kBins = 4096;
    static constexpr float kLearningRate = 0.05f;

    struct alignas(64) Output {
        Hidden weights;
        float bias = -1.5f;  // prior of one among several candidates
    };

    // Does a step of gradient ascent on the log-likelihood of whether `token` came; adds to the hidden layer's gradient.
    void learn_output(const Hidden& hidden, Token token, bool came, Hidden& gradient) {
        Output& output = outputs_[bin_of(token)];
        const float sum = score(hidden, token);
        if (came ? sum >= kMaxScore : sum <= -kMaxScore) return;  // the score is clamped, so a larger sum has no effect
        const float said = 1.0f / (1.0f + std::exp(-sum));
        const float step = kLearningRate * ((came ? 1.0f : 0.0f) - said);
        for (size_t d = 0; d < kWidth; ++d) {
            gradient[d] += step * output.weights[d];
            output.weights[d] += step * hidden[d];
        }
        output.bias += step;
    }

    std::vector<Hidden> inputs_;  // [distance to the token, bin]
    std::vector<Output> outputs_;
};

}  // namespace rhyme
