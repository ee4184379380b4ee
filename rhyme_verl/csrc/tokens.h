// Tokens, places in remembered texts, and how runs of tokens are found again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "span.h"

namespace rhyme {

using Token = int32_t;
using Position = uint32_t;   // a place in a PromptHistory, or in a LiveGroup if kLive is set
using PromptKey = uint64_t;

constexpr Token kEnd = -1;  // what stands where a text ends; never a token id
constexpr Position kLive = 1u << 31;
constexpr Position kNowhere = UINT32_MAX;

struct Match {
    Position next = kNowhere;  // place of the token after the match
    int length = 0;            // tokens that agree, at most kMaxMatchTokens
};

constexpr size_t kGramTokens = 8;    // tokens that must agree for a match
constexpr int kMaxMatchTokens = 32;  // longer agreement says nothing more about the next token

// How many tokens before `text` equal those before `tail`; at most `limit` are looked at.
inline int common_suffix(const Token* text, const Token* tail, int limit) {
    int length = 0;
    while (length < limit && text[-1 - length] == tail[-1 - length]) ++length;
    return length;
}

// The newest place after each gram (run of kGramTokens tokens), by hash. Whoever keeps the places chains each one to the
// one that it replaces, so that all places of a gram are found, newest first. Grams that share a hash share a chain.
class NewestPlaces {
  public:
    explicit NewestPlaces(size_t num_buckets = 1) : places_(num_buckets, kNowhere) {}

    // `end` points behind the gram, here and below.
    Position find(const Token* end) const { return places_[bucket_of(end)]; }

    // Returns the place that `place` replaces.
    Position replace(const Token* end, Position place) {
        Position& newest = places_[bucket_of(end)];
        const Position replaced = newest;
        newest = place;
        return replaced;
    }

    size_t num_buckets() const { return places_.size(); }
    int64_t num_bytes() const { return static_cast<int64_t>(places_.capacity() * sizeof(Position)); }

  private:
    size_t bucket_of(const Token* end) const {
        uint64_t hash = 0x9E3779B97F4A7C15ull;
        for (const Token* token = end - kGramTokens; token != end; ++token) {
            hash = (hash ^ static_cast<uint32_t>(*token)) * 0xD6E8FEB86659FD93ull;
        }
        return static_cast<size_t>(((hash >> 32) * places_.size()) >> 32);
    }

    std::vector<Position> places_;
};

}  // namespace rhyme
