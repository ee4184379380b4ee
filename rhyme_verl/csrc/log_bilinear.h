// How well does a token go with the sixteen before it? A log-bilinear model (A. Mnih and G. Hinton, 2007) with a bounded
// hidden layer, learnt online from the running requests by comparing the token that came with those that were expected.
//
// Contexts that are counted say nothing when they are new; this model says that a context resembles others. Tokens share
// a fixed number of bins, so the size does not grow with the vocabulary. Not thread-safe; may be read by many while
// nobody learns.
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
    static constexpr size_t kWidth = 16;    // of the hidden layer
    static constexpr float kMaxScore = 8.0f;

    using Bin = uint16_t;
    using Context = std::array<Bin, kContext>;  // bins of the tokens before, the last one first; bin 0 where there is none
    using Hidden = std::array<float, kWidth>;

    LogBilinear() : inputs_(kContext * kBins), outputs_(kBins) {
        uint32_t state = 1;  // small weights that differ: equal ones would stay equal
        const auto small = [&state] {
            state = state * 1664525u + 1013904223u;
            return 0.3f * (static_cast<float>(state >> 8) / static_cast<float>(1 << 24) - 0.5f);
        };
        for (Hidden& input : inputs_) std::generate(input.begin(), input.end(), small);
        for (Output& output : outputs_) std::generate(output.weights.begin(), output.weights.end(), small);
    }

    static Bin bin_of(Token token) { return static_cast<Bin>((static_cast<uint32_t>(token) * 2654435769u) >> 20); }

    // The contexts of a text's tokens overlap, so they are made from the bins of the text: `end` points behind the last
    // of the `available` ones.
    static Context context_of(const Bin* end, size_t available) {
        Context context{};
        for (size_t i = 0; i < std::min(available, kContext); ++i) context[i] = *(end - 1 - i);
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

    // Log-odds that the token comes, in [-kMaxScore, kMaxScore].
    float score(const Hidden& hidden, Token token) const {
        const Output& output = outputs_[bin_of(token)];
        float sum = output.bias;
        for (size_t d = 0; d < kWidth; ++d) sum += hidden[d] * output.weights[d];
        return std::clamp(sum, -kMaxScore, kMaxScore);
    }

    // `truth` came after `context`, where the `expected` tokens might have.
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
        return std::all_of(outputs_.begin(), outputs_.end(), [](const Output& output) {
            return std::isfinite(output.bias) && std::isfinite(output.weights[0]);
        });
    }

  private:
    static constexpr size_t kBins = 4096;
    static constexpr float kLearningRate = 0.05f;

    struct alignas(64) Output {
        Hidden weights;
        float bias = -1.5f;  // a token of several that are expected
    };

    // One step of gradient ascent on the log-likelihood of whether `token` came; adds to the hidden layer's gradient.
    void learn_output(const Hidden& hidden, Token token, bool came, Hidden& gradient) {
        Output& output = outputs_[bin_of(token)];
        const float sum = score(hidden, token);
        if (came ? sum >= kMaxScore : sum <= -kMaxScore) return;  // further would not be seen
        const float said = 1.0f / (1.0f + std::exp(-sum));
        const float step = kLearningRate * ((came ? 1.0f : 0.0f) - said);
        for (size_t d = 0; d < kWidth; ++d) {
            gradient[d] += step * output.weights[d];
            output.weights[d] += step * hidden[d];
        }
        output.bias += step;
    }

    std::vector<Hidden> inputs_;  // [place before the token, bin]
    std::vector<Output> outputs_;
};

}  // namespace rhyme
