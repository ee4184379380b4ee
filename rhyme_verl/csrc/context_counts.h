// Counts which tokens follow each context of a few tokens, and keeps the three most frequent ones per context.
//
// The table consists of cache lines with four contexts each. A new context replaces the rarest one in its line, and counts
// are halved when they reach their maximum, so recently frequent tokens win. Contexts of all lengths (orders) share one
// table, which has a fixed size (ContextCounts) or is made to grow with its text (LiveCounts). Not thread-safe: threads may
// read concurrently only while none learns.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "tables.h"
#include "tokens.h"

namespace rhyme {

constexpr int kMaxOrder = 5;  // tokens in the longest context that is counted over all prompts
constexpr int kMaxLocalOrder = 3;  // and within one prompt, whose texts are followed for longer ones

// Hashes of the last 1, 2, ... up to kMaxOrder tokens before `tail`, of which `available` exist. Keeps no pointer to them.
struct ContextHashes {
    int orders;
    std::array<uint32_t, kMaxOrder> of;  // [order - 1]

    ContextHashes(const Token* tail, size_t available) : orders(static_cast<int>(std::min<size_t>(available, kMaxOrder))) {
        uint64_t state = 0x9E3779B97F4A7C15ull;
        for (int order = 1; order <= orders; ++order) {
            state = (state ^ static_cast<uint32_t>(tail[-order])) * 0xD6E8FEB86659FD93ull;
            of[static_cast<size_t>(order - 1)] = static_cast<uint32_t>((state ^ (state >> 29)) >> 16);
        }
    }
};

constexpr Token kMaxCountedToken = (1 << 24) - 1;  // larger ids are not counted

// The followers of one context, most frequent first.
struct Followers {
    static constexpr uint32_t kMaxCount = 255;
    struct One {
        uint32_t token : 24;
        uint32_t count : 8;
    };

    uint32_t tag : 24 = 0;  // of the context's hash; never 0 in use
    uint32_t others : 8 = 0;  // count of all other followers
    std::array<One, 3> most{};

    int total() const { return static_cast<int>(most[0].count + most[1].count + most[2].count + others); }
    bool is_in_order() const { return most[0].count >= most[1].count && most[1].count >= most[2].count; }

    void add(uint32_t token) {
        auto* place = std::ranges::find_if(most, [&](One one) { return one.count == 0 || one.token == token; });
        if (place == most.end()) {
            if (others < kMaxCount) ++others;  // they gain this token, or the one that it replaces
            One& last = most.back();
            last = last.count > 1 ? One{last.token, last.count - 1u} : One{token, 1};
            return;
        }
        *place = {token, place->count + 1u};
        if (place->count == kMaxCount) {
            for (One& one : most) one.count /= 2;
            others /= 2;
        }
        for (; place > most.begin() && place->count > place[-1].count; --place) std::swap(*place, place[-1]);
    }
};

class alignas(64) CountsLine {
  public:
    static constexpr size_t kContexts = 4;

    void learn(uint32_t hash, Token next) {
        const uint32_t tag = tag_of(hash);
        Followers* rarest = &contexts_[0];
        for (Followers& context : contexts_) {
            if (context.tag == tag) return context.add(static_cast<uint32_t>(next));
            if (context.total() < rarest->total()) rarest = &context;
        }
        *rarest = {.tag = tag};
        rarest->add(static_cast<uint32_t>(next));
    }

    const Followers* find(uint32_t hash) const {
        const uint32_t tag = tag_of(hash);
        for (const Followers& context : contexts_) {
            if (context.tag == tag) return &context;
        }
        return nullptr;
    }

    // Removes the contexts whose hashes have `bit`, from 2 to 1 << 23, and returns them.
    CountsLine split(uint32_t bit) {
        CountsLine taken;
        for (size_t i = 0; i < kContexts; ++i) {
            if (contexts_[i].tag & bit) std::swap(contexts_[i], taken.contexts_[i]);
        }
        return taken;
    }

    bool is_in_order() const {
        return std::ranges::all_of(contexts_, &Followers::is_in_order);
    }

  private:
    static uint32_t tag_of(uint32_t hash) { return (hash & 0xFFFFFFu) | 1u; }

    std::array<Followers, kContexts> contexts_;
};

template <typename Table>
class Counts {
  public:
    // `num_contexts`: approximate capacity.
    explicit Counts(size_t num_contexts = 0)
        : lines_(std::max<size_t>(1, num_contexts / CountsLine::kContexts), CountsLine{}) {}

    void learn(uint32_t hash, Token next) {
        if (next <= kMaxCountedToken) lines_[hash].learn(hash, next);
    }

    // Prefetches the lines of all contexts that end here, because a large table does not stay in the CPU cache.
    void prefetch(const ContextHashes& hashes) const {
        for (int order = 1; order <= hashes.orders; ++order) {
            __builtin_prefetch(&lines_[hashes.of[static_cast<size_t>(order - 1)]]);
        }
    }

    // Returns null if the context is unknown. Valid until the next learn() or grow().
    const Followers* find(uint32_t hash) const { return lines_[hash].find(hash); }

    // Adds room for CountsLine::kContexts contexts.
    void grow() {
        lines_.grow([](CountsLine& line, uint32_t bit) { return line.split(bit); });
    }

    size_t num_contexts() const { return lines_.slots().size() * CountsLine::kContexts; }
    int64_t num_bytes() const { return lines_.num_bytes(); }
    bool is_in_order() const { return std::ranges::all_of(lines_.slots(), &CountsLine::is_in_order); }

  private:
    Table lines_;
};

using ContextCounts = Counts<FixedTable<CountsLine>>;
using LiveCounts = Counts<GrowingTable<CountsLine>>;

// Counts what follows each context of up to `max_order` tokens, for the tokens of `text` from `begin` on.
template <typename Table>
void count_contexts(Span<Token> text, size_t begin, int max_order, Counts<Table>& counts) {
    for (size_t i = std::max<size_t>(begin, 1); i < text.size(); ++i) {
        const ContextHashes hashes(&text[i], std::min<size_t>(i, static_cast<size_t>(max_order)));
        counts.prefetch(hashes);
        for (int order = 1; order <= hashes.orders; ++order) {
            counts.learn(hashes.of[static_cast<size_t>(order - 1)], text[i]);
        }
    }
}

}  // namespace rhyme
