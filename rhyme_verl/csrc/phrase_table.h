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
    int hits = 0;        // how often it was right of late
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
        for (size_t order = 0; order < kOrders.size(); ++order) {
            const uint32_t hash = hash_gram(tail - kOrders[order], kOrders[order]);
            Entry& entry = tables_[order][hash >> (32 - kBits)];
            if (entry.check != static_cast<uint16_t>(hash)) {
                if (entry.hits > 0) {
                    --entry.hits;
                    continue;
                }
                entry = {token, static_cast<uint16_t>(hash), 1};
            } else if (entry.token == token) {
                if (entry.hits < kMaxHits) ++entry.hits;
            } else if (entry.hits > 1) {
                entry.hits /= 2;
            } else {
                entry = {token, static_cast<uint16_t>(hash), 1};
            }
        }
    }

    PhraseGuess guess(const Token* tail) const {
        for (size_t order = 0; order < kOrders.size(); ++order) {
            const uint32_t hash = hash_gram(tail - kOrders[order], kOrders[order]);
            const Entry& entry = tables_[order][hash >> (32 - kBits)];
            if (entry.check == static_cast<uint16_t>(hash) && entry.hits > 1) {
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

    std::array<std::vector<Entry>, kOrders.size()> tables_;
};

}  // namespace rhyme
