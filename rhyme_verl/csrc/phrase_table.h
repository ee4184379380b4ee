// What usually follows a few given tokens, whatever the prompt: common phrases, for prompts that were never seen.
//
// For each order (length of the context) a fixed table maps a context's hash to the token that last proved right and
// how often it did. Frequent contexts push out rare ones, so the size need not grow with the text. Not thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "tokens.h"

namespace rhyme {

struct PhraseGuess {
    Token token = kEnd;  // kEnd: no idea
    int order = 0;       // index into kOrders
    int hits = 0;        // recent correct predictions
};

class PhraseTable {
  public:
    static constexpr std::array<int, 3> kOrders{8, 4, 2};  // tokens of context, longest first
    static constexpr int kMaxOrder = 8;
    static constexpr int kMaxHits = 63;

    PhraseTable() {
        for (auto& table : tables_) table.resize(size_t{1} << kBits);
    }

    // `tail` points behind at least kMaxOrder tokens, after which `token` came.
    void learn(const Token* tail, Token token) {
        const Hashes hashes = hash(tail);
        for (size_t order = 0; order < kOrders.size(); ++order) {
            const uint16_t check = static_cast<uint16_t>(hashes[order]);
            Entry& entry = tables_[order][hashes[order] >> (32 - kBits)];
            if (entry.check != check && entry.hits > 0) {
                --entry.hits;
            } else if (entry.check == check && entry.token == token) {
                entry.hits += entry.hits < kMaxHits;
            } else if (entry.check == check && entry.hits > 1) {
                entry.hits /= 2;
            } else {
                entry = {token, check, 1};
            }
        }
    }

    PhraseGuess guess(const Token* tail) const {
        const Hashes hashes = hash(tail);
        for (size_t order = 0; order < kOrders.size(); ++order) {
            const Entry& entry = tables_[order][hashes[order] >> (32 - kBits)];
            if (entry.check == static_cast<uint16_t>(hashes[order]) && entry.hits > 1) {
                return {entry.token, static_cast<int>(order), entry.hits};
            }
        }
        return {};
    }

  private:
    static constexpr int kBits = 16;  // entries of a table, as a power of two: it should stay in a core's cache

    struct Entry {
        Token token = kEnd;
        uint16_t check = 0;
        uint16_t hits = 0;
    };

    using Hashes = std::array<uint32_t, kOrders.size()>;

    // Of the contexts of all orders: each is a part of the next longer one, so one pass from the end does.
    static Hashes hash(const Token* tail) {
        Hashes hashes;
        uint64_t state = 0x9E3779B97F4A7C15ull;
        int taken = 0;
        for (size_t order = kOrders.size(); order-- > 0;) {
            while (taken < kOrders[order]) state = (state ^ static_cast<uint32_t>(tail[-++taken])) * 0xD6E8FEB86659FD93ull;
            hashes[order] = static_cast<uint32_t>(state >> 32);
        }
        return hashes;
    }

    std::array<std::vector<Entry>, kOrders.size()> tables_;
};

}  // namespace rhyme
