// Token ids, positions in remembered texts (prompts and answers), and an index of where runs of tokens occur.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <utility>

#include "tables.h"

namespace rhyme {

// Does not own the values, so it is valid only as long as they are neither freed nor moved.
template <typename T>
using Span = std::span<const T>;

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

constexpr size_t kGramTokens = 8;        // minimum length of a match
constexpr size_t kMaxMatchTokens = 32;   // a longer match predicts no better
constexpr int kMaxMatchCandidates = 32;  // positions visited per search

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

    // Stores `place` and returns the position that it replaces. `end` points just past the gram; it is read in the call.
    Position replace(const Token* end, Position place) { return std::exchange(places_[hash_of_gram(end)], place); }

    struct Spot {
        const Token* end;  // just past the gram
        size_t limit;  // of a match: tokens of the text before `end`
        Position prev;  // what its position has replaced
    };

    // Calls visit(match) for runs of at least kGramTokens tokens that equal the end of `context`, newest first.
    // `spot_of(position)` returns a Spot.
    template <typename SpotOf, typename Visit>
    void find(Span<Token> context, size_t max_matches, SpotOf spot_of, Visit visit) const {
        if (context.size() < kGramTokens) return;
        const Token* tail = context.data() + context.size();
        size_t found = 0;
        Position place = places_[hash_of_gram(tail)];
        for (int looked = 0; place != kNowhere && looked < kMaxMatchCandidates && found < max_matches; ++looked) {
            const Spot spot = spot_of(place);
            const size_t limit = std::min({context.size(), spot.limit, kMaxMatchTokens});
            size_t length = 0;
            while (length < limit && *(spot.end - 1 - length) == *(tail - 1 - length)) ++length;
            if (length >= kGramTokens) {
                visit(Match{place, static_cast<int>(length)});
                ++found;
            }
            place = spot.prev;
        }
    }

    // Adds a bucket. Chains that begin in both parts of the divided one have a common rest.
    void grow() {
        places_.grow([](Position& newest, uint32_t) { return newest; });
    }

    const auto& buckets() const { return places_.slots(); }
    int64_t num_bytes() const { return places_.num_bytes(); }

  private:
    Table places_;
};

using NewestPlaces = Places<FixedTable<Position>>;
using NewestLivePlaces = Places<GrowingTable<Position>>;

}  // namespace rhyme
