// Token ids, positions in remembered texts (prompts and answers), and an index of where runs of tokens occur.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "span.h"
#include "tables.h"

namespace rhyme {

using Token = int32_t;
using Position = uint32_t;   // in a PromptHistory, or in a LiveGroup if kLive is set
using PromptKey = uint64_t;

constexpr Token kEnd = -1;  // closes every text; never a token id
constexpr Position kLive = 1u << 31;
constexpr Position kNowhere = UINT32_MAX;

inline void check_tokens(Span<Token> tokens) {
    for (const Token token : tokens) {
        if (token < 0) throw std::invalid_argument("token ids must be >= 0");
    }
}

struct Match {
    Position next = kNowhere;  // position of the token after the match
    int length = 0;            // tokens that agree, at most kMaxMatchTokens
};

constexpr size_t kGramTokens = 8;    // minimum length of a match
constexpr int kMaxMatchTokens = 32;  // a longer match predicts no better

// Returns how many tokens before `text` equal those before `tail`. Both must have at least `limit` tokens before them.
inline int common_suffix(const Token* text, const Token* tail, int limit) {
    int length = 0;
    while (length < limit && text[-1 - length] == tail[-1 - length]) ++length;
    return length;
}

inline uint32_t hash_of_gram(const Token* end) {
    uint64_t hash = 0x9E3779B97F4A7C15ull;
    for (const Token* token = end - kGramTokens; token != end; ++token) {
        hash = (hash ^ static_cast<uint32_t>(*token)) * 0xD6E8FEB86659FD93ull;
    }
    return static_cast<uint32_t>(hash >> 32);
}

// Maps the hash of each gram (a run of kGramTokens tokens) to the newest position after it. The caller links each position
// to the one it replaces, so a search visits all positions of a gram, newest first. Grams with equal hashes share a chain.
template <typename Table>
class Places {
  public:
    explicit Places(size_t num_buckets = 1) : places_(num_buckets, kNowhere) {}

    // `end` points just past the gram, here and below. It is read only during the call.
    Position find(const Token* end) const { return places_[hash_of_gram(end)]; }

    // Stores `place` and returns the position that it replaces.
    Position replace(const Token* end, Position place) {
        Position& newest = places_[hash_of_gram(end)];
        const Position replaced = newest;
        newest = place;
        return replaced;
    }

    // Adds a bucket. Chains that begin in both parts of the divided one have a common rest.
    void grow() {
        places_.grow([](Position& newest, uint32_t) { return newest; });
    }

    size_t num_buckets() const { return places_.size(); }
    int64_t num_bytes() const { return places_.num_bytes(); }
    template <typename Visit>
    void for_each(Visit visit) const {
        places_.for_each(visit);
    }

  private:
    Table places_;
};

using NewestPlaces = Places<FixedTable<Position>>;
using NewestLivePlaces = Places<GrowingTable<Position>>;

}  // namespace rhyme
