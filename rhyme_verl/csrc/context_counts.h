// Counts which tokens follow each context of a few tokens, and keeps the three most frequent ones per context.
//
// The table consists of cache lines with four contexts each and never grows: a new context replaces the rarest one in its
// line, and counts are halved when they reach their maximum, so recently frequent tokens win. Contexts of all lengths
// (orders) share one table. Not thread-safe: threads may read concurrently only while none learns.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "span.h"
#include "tokens.h"

namespace rhyme {

constexpr int kMaxOrder = 5;       // tokens in the longest context that is counted over all prompts
constexpr int kMaxLocalOrder = 3;  // and within one prompt, whose texts are followed for longer ones

// Hashes of the last 1, 2, ... up to kMaxOrder tokens before `tail`, of which `available` exist. Keeps no pointer to them.
struct ContextHashes {
    int orders;
    std::array<uint32_t, kMaxOrder> of;  // [order - 1]

    ContextHashes(const Token* tail, size_t available)
        : orders(static_cast<int>(std::min<size_t>(available, kMaxOrder))) {
        uint64_t state = 0x9E3779B97F4A7C15ull;
        for (int order = 1; order <= orders; ++order) {
            state = (state ^ static_cast<uint32_t>(tail[-order])) * 0xD6E8FEB86659FD93ull;
            of[static_cast<size_t>(order - 1)] = static_cast<uint32_t>((state ^ (state >> 29)) >> 16);
        }
    }
};

class ContextCounts {
  public:
    static constexpr int kFollowers = 3;
    static constexpr Token kMaxToken = (1 << 24) - 1;  // larger ids are not counted

    // The followers of one context, most frequent first.
    class Followers {
      public:
        Token token(int i) const { return static_cast<Token>(seen_[static_cast<size_t>(i)] >> 8); }
        int count(int i) const { return static_cast<int>(seen_[static_cast<size_t>(i)] & 0xFF); }
        int total() const { return count(0) + count(1) + count(2) + static_cast<int>(tag_ & 0xFF); }

      private:
        friend class ContextCounts;
        void add(Token token);

        uint32_t tag_ = 0;  // 24 bits: hash, never 0 in use; 8 bits: count of all other followers
        std::array<uint32_t, kFollowers> seen_{};  // 24 bits: token; 8 bits: count
    };

    // `num_contexts`: approximate capacity.
    explicit ContextCounts(size_t num_contexts = 0) : lines_(std::max<size_t>(1, num_contexts / kPerLine)) {}

    void learn(uint32_t hash, Token next) {
        if (next > kMaxToken) return;
        Line& line = line_of(hash);
        const uint32_t tag = tag_of(hash);
        Followers* rarest = &line.contexts[0];
        for (Followers& context : line.contexts) {
            if ((context.tag_ & ~0xFFu) == tag) {
                context.add(next);
                return;
            }
            if (context.total() < rarest->total()) rarest = &context;
        }
        *rarest = Followers{};
        rarest->tag_ = tag;
        rarest->add(next);
    }

    // Prefetches the lines of all contexts that end here, because a large table does not stay in the CPU cache.
    void prefetch(const ContextHashes& hashes) const {
        for (int order = 1; order <= hashes.orders; ++order) {
            __builtin_prefetch(&line_of(hashes.of[static_cast<size_t>(order - 1)]));
        }
    }

    // Returns null if the context is unknown. Valid until the next learn().
    const Followers* find(uint32_t hash) const {
        const uint32_t tag = tag_of(hash);
        for (const Followers& context : line_of(hash).contexts) {
            if ((context.tag_ & ~0xFFu) == tag) return &context;
        }
        return nullptr;
    }

    int64_t num_bytes() const { return static_cast<int64_t>(lines_.capacity() * sizeof(Line)); }

  private:
    static constexpr size_t kPerLine = 4;

    struct alignas(64) Line {
        std::array<Followers, kPerLine> contexts;
    };

    static uint32_t tag_of(uint32_t hash) { return (hash << 8) | 0x100u; }
    Line& line_of(uint32_t hash) { return lines_[index_of(hash)]; }
    const Line& line_of(uint32_t hash) const { return lines_[index_of(hash)]; }
    size_t index_of(uint32_t hash) const { return static_cast<size_t>((uint64_t{hash} * lines_.size()) >> 32); }

    std::vector<Line> lines_;
};

inline void ContextCounts::Followers::add(Token token) {
    const uint32_t wanted = static_cast<uint32_t>(token) << 8;
    size_t place = 0;
    while (place < kFollowers && (seen_[place] & 0xFF) != 0 && (seen_[place] & ~0xFFu) != wanted) ++place;
    if (place == kFollowers) {
        uint32_t& last = seen_[kFollowers - 1];
        if ((tag_ & 0xFF) < 0xFF) ++tag_;  // the other followers gain this token, or the one that it replaces
        if ((last & 0xFF) > 1) {
            --last;
            return;
        }
        last = wanted | 1;
        return;
    }
    seen_[place] = wanted | ((seen_[place] & 0xFF) + 1);
    if ((seen_[place] & 0xFF) == 0xFF) {
        for (uint32_t& one : seen_) one = (one & ~0xFFu) | ((one & 0xFF) >> 1);
        tag_ = (tag_ & ~0xFFu) | ((tag_ & 0xFF) >> 1);
    }
    while (place > 0 && (seen_[place] & 0xFF) > (seen_[place - 1] & 0xFF)) {
        std::swap(seen_[place], seen_[place - 1]);
        --place;
    }
}

// Counts what follows each context of up to `max_order` tokens, for the tokens of `text` from `begin` on.
inline void count_contexts(Span<Token> text, size_t begin, int max_order, ContextCounts& counts) {
    for (size_t i = std::max<size_t>(begin, 1); i < text.size(); ++i) {
        const ContextHashes hashes(&text[i], std::min<size_t>(i, static_cast<size_t>(max_order)));
        counts.prefetch(hashes);
        for (int order = 1; order <= hashes.orders; ++order) {
            counts.learn(hashes.of[static_cast<size_t>(order - 1)], text[i]);
        }
    }
}

}  // namespace rhyme
