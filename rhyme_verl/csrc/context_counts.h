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
class Followers {
  public:
    static constexpr int kMost = 3;

    Token token(int i) const { return static_cast<Token>(seen_[static_cast<size_t>(i)] >> 8); }
    int count(int i) const { return static_cast<int>(seen_[static_cast<size_t>(i)] & 0xFF); }
    int total() const { return count(0) + count(1) + count(2) + static_cast<int>(tag_ & 0xFF); }
    bool is_in_order() const { return count(0) >= count(1) && count(1) >= count(2); }

  private:
    friend class CountsLine;
    void add(Token token);

    uint32_t tag_ = 0;  // 24 bits: hash, never 0 in use; 8 bits: count of all other followers
    std::array<uint32_t, kMost> seen_{};  // 24 bits: token; 8 bits: count
};

class alignas(64) CountsLine {
  public:
    static constexpr size_t kContexts = 4;

    void learn(uint32_t hash, Token next) {
        const uint32_t tag = tag_of(hash);
        Followers* rarest = &contexts_[0];
        for (Followers& context : contexts_) {
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

    const Followers* find(uint32_t hash) const {
        const uint32_t tag = tag_of(hash);
        for (const Followers& context : contexts_) {
            if ((context.tag_ & ~0xFFu) == tag) return &context;
        }
        return nullptr;
    }

    // Removes the contexts whose hashes have `bit`, from 2 to 1 << 23, and returns them.
    CountsLine split(uint32_t bit) {
        CountsLine taken;
        for (size_t i = 0; i < kContexts; ++i) {
            if (contexts_[i].tag_ & bit << 8) std::swap(contexts_[i], taken.contexts_[i]);
        }
        return taken;
    }

    bool is_in_order() const {
        return std::all_of(contexts_.begin(), contexts_.end(), [](const Followers& one) { return one.is_in_order(); });
    }

  private:
    static uint32_t tag_of(uint32_t hash) { return (hash << 8) | 0x100u; }

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

    size_t num_contexts() const { return lines_.size() * CountsLine::kContexts; }
    int64_t num_bytes() const { return lines_.num_bytes(); }
    bool is_in_order() const {
        bool all = true;
        lines_.for_each([&all](const CountsLine& line) { all &= line.is_in_order(); });
        return all;
    }

  private:
    Table lines_;
};

using ContextCounts = Counts<FixedTable<CountsLine>>;
using LiveCounts = Counts<GrowingTable<CountsLine>>;

inline void Followers::add(Token token) {
    const uint32_t wanted = static_cast<uint32_t>(token) << 8;
    size_t place = 0;
    while (place < kMost && (seen_[place] & 0xFF) != 0 && (seen_[place] & ~0xFFu) != wanted) ++place;
    if (place == kMost) {
        uint32_t& last = seen_[kMost - 1];
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
