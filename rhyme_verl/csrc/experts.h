// Collects what several kinds of context predict for the next token. Each kind is an expert; the most specific comes first.
//
// Experts are the request's cursors, which follow remembered texts (cursor.h), and counts of short contexts, kept per
// prompt and for all prompts together (context_counts.h).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "context_counts.h"
#include "cursor.h"
#include "tokens.h"

namespace rhyme {

constexpr std::array<int, 4> kRuns{20, 12, 8, 4};  // texts whose last 20, 12, 8, 4 tokens agree
constexpr size_t kEdited = kRuns.size();  // texts that agreed before a difference
constexpr size_t kLocal = kEdited + 1;  // contexts in the prompt's texts, longest first
constexpr size_t kWeak = kLocal + kMaxLocalOrder;  // texts that agree in fewer tokens, or that begin here
constexpr size_t kCommon = kWeak + 1;  // contexts in the texts of all prompts, longest first
constexpr size_t kNumExperts = kCommon + kMaxOrder;

// What all experts predict for one position.
struct Evidence {
    static constexpr size_t kCandidates = 8;

    size_t num_candidates = 0;
    std::array<Token, kCandidates> tokens;
    std::array<int16_t, kNumExperts> totals{};  // how often each expert's context was seen; 0: unknown
    std::array<std::array<int16_t, kCandidates>, kNumExperts> counts{};  // how often each candidate followed

    // Records that an expert has seen `token` follow `count` times. Experts are asked from the most specific on, so a token
    // that comes when all candidates are taken is ignored.
    void add(size_t expert, Token token, int count) {
        size_t c = 0;
        while (c < num_candidates && tokens[c] != token) ++c;
        if (c == kCandidates) return;
        if (c == num_candidates) tokens[num_candidates++] = token;
        counts[expert][c] += static_cast<int16_t>(count);
    }

    // Returns the most specific expert that knows its context. It exists if there is a candidate.
    size_t longest() const {
        return static_cast<size_t>(std::ranges::find_if(totals, [](int total) { return total != 0; }) - totals.begin());
    }
};

// The walks of a request that predict, positioned at the next token. Valid as long as a Walk.
struct Walks {
    static constexpr size_t kMost = 4;

    std::array<Walk, kMost> of;
    size_t count = 0;

    // Moves past `token` and drops walks that lose their position.
    void advance(Token token, bool rejoin) {
        size_t kept = 0;
        for (size_t w = 0; w < count; ++w) {
            if (of[w].follow({&token, 1}, rejoin)) of[kept++] = of[w];
        }
        count = kept;
    }
};

inline void ask_texts(const Walks& walks, Evidence& evidence) {
    for (size_t w = 0; w < walks.count; ++w) {
        const Walk& walk = walks.of[w];
        const Token token = *walk.next;
        if (token == kEnd) continue;
        bool is_long = false;
        for (size_t expert = 0; expert < kRuns.size(); ++expert) {
            if (walk.run < kRuns[expert]) continue;
            is_long = true;
            evidence.totals[expert] += 1;
            evidence.add(expert, token, 1);
        }
        const bool is_edited = walk.score >= static_cast<float>(walk.run) + 1.0f;
        if (is_long && !is_edited) continue;
        const int times = is_edited ? 1 + static_cast<int>(walk.score / 4.0f) : 1;
        evidence.totals[is_edited ? kEdited : kWeak] += static_cast<int16_t>(times);
        evidence.add(is_edited ? kEdited : kWeak, token, times);
    }
}

template <typename Table>
void ask_counts(const Counts<Table>& counts, const ContextHashes& hashes, int order, size_t expert, Evidence& evidence) {
    const Followers* followers = counts.find(hashes.of[static_cast<size_t>(order - 1)]);
    if (!followers) return;
    evidence.totals[expert] += static_cast<int16_t>(followers->total());
    for (const Followers::One& one : followers->most) {
        if (one.count > 0) evidence.add(expert, static_cast<Token>(one.token), one.count);
    }
}

// Asks the counts of the prompt's own texts: its history and its running siblings.
inline void ask_prompt(const Texts& texts, const ContextHashes& hashes, Evidence& evidence) {
    for (int order = std::min(hashes.orders, kMaxLocalOrder); order > 0; --order) {
        const size_t expert = kLocal + static_cast<size_t>(kMaxLocalOrder - order);
        if (texts.past) ask_counts(texts.past->counts(), hashes, order, expert, evidence);
        if (texts.live) ask_counts(texts.live->counts(), hashes, order, expert, evidence);
    }
}

inline void ask_all_prompts(const ContextCounts& common, const ContextHashes& hashes, Evidence& evidence) {
    for (int order = hashes.orders; order > 0; --order) {
        ask_counts(common, hashes, order, kCommon + static_cast<size_t>(kMaxOrder - order), evidence);
    }
}

}  // namespace rhyme
