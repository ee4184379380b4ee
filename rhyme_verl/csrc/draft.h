// A draft: a path, or a tree, of tokens.
//
// The path of the most likely tokens, the trunk, comes first; after it come the branches, most likely first. Each token names
// its parent, the token before it, which has a smaller index and at least its likelihood. So what remains of a draft when its
// trunk and its branches are cut at a likelihood is a draft again. A tree is verified in one pass; the accepted tokens are a
// path from its root, which is the end of the context.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "mixer.h"
#include "span.h"
#include "tokens.h"

namespace rhyme {

struct Draft {
    static constexpr int kMaxTokens = 127;
    static constexpr int kRoot = -1;  // parent of the tokens that follow the context

    std::array<Token, kMaxTokens> tokens;
    std::array<int16_t, kMaxTokens> parents;
    std::array<float, kMaxTokens> likelihoods;  // [i]: that token i and all before it on its path are accepted
    std::vector<Prediction> predictions;  // [i + 1]: of what follows token i; [0]: of what follows the context
    int size = 0;  // tokens to verify
    int trunk = 0;  // at most as many of its first tokens are the trunk
    bool has_predictions = false;  // that have not been learnt from
    int num_accepted = 0;  // of its tokens, once it has been verified
    int64_t call = 0;  // number of the call of Drafter::draft() that made it

    Span<Token> view() const { return {tokens.data(), static_cast<size_t>(size)}; }
    bool branches() const { return size > trunk; }
    float likelihood(int i) const { return i == kRoot ? 1.0f : likelihoods[static_cast<size_t>(i)]; }
    Prediction& after(int i) { return predictions[static_cast<size_t>(i + 1)]; }

    // Whether parents come before their children and are at least as likely, and siblings differ.
    bool is_tree() const {
        bool all = true;
        for (int i = 0; i < size; ++i) {
            const int parent = parents[static_cast<size_t>(i)];
            all &= parent >= kRoot && parent < i && likelihood(i) <= likelihood(parent) && (i >= trunk || parent == i - 1);
            all &= child(parent, tokens[static_cast<size_t>(i)]) == i;
        }
        return all;
    }

    void clear() {
        size = trunk = 0;
        has_predictions = false;
    }

    void add(Token token, int parent, float likelihood) {
        const auto i = static_cast<size_t>(size++);
        tokens[i] = token;
        parents[i] = static_cast<int16_t>(parent);
        likelihoods[i] = likelihood;
    }

    // Returns the index of the token that follows `parent` and equals `token`, or kRoot if there is none.
    int child(int parent, Token token) const {
        for (int i = parent + 1; i < size; ++i) {
            if (parents[static_cast<size_t>(i)] == parent && tokens[static_cast<size_t>(i)] == token) return i;
        }
        return kRoot;
    }

    // Keeps the first `kept_trunk` tokens of the trunk and the first `kept_branches` others, whose parents must be kept.
    void keep(int kept_trunk, int kept_branches) {
        const int moved = trunk - kept_trunk;
        if (moved > 0) {
            for (int i = kept_trunk; i < kept_trunk + kept_branches; ++i) {
                const auto to = static_cast<size_t>(i), from = static_cast<size_t>(i + moved);
                tokens[to] = tokens[from];
                likelihoods[to] = likelihoods[from];
                parents[to] = static_cast<int16_t>(parents[from] < trunk ? parents[from] : parents[from] - moved);
                predictions[to + 1] = predictions[from + 1];
            }
        }
        trunk = kept_trunk;
        size = kept_trunk + kept_branches;
    }
};

}  // namespace rhyme
