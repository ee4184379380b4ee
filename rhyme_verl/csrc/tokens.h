// Token ids, positions in remembered texts (prompts and answers), and an index of where runs of tokens occur.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "span.h"

namespace rhyme {

using Token = int32_t;
using Position = uint32_t;   // in a PromptHistory, or in a LiveGroup if kLive is set
using PromptKey = uint64_t;

constexpr Token kEnd = -1;  // closes every text; never a token id
constexpr Position kLive = 1u << 31;
constexpr Position kNowhere = UINT32_MAX;

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

// Maps the hash of each gram (a run of kGramTokens tokens) to the newest position after it. The caller links each position
// to the one it replaces, so a search visits all positions of a gram, newest first. Grams with equal hashes share a chain.
class NewestPlaces {
  public:
    explicit NewestPlaces(size_t num_buckets = 1) : places_(num_buckets, kNowhere) {}

    // `end` points just past the gram, here and below. It is read only during the call.
    Position find(const Token* end) const { return places_[bucket_of(end)]; }

    // Stores `place` and returns the position that it replaces.
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
