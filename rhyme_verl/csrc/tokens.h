// Tokens, places in remembered texts, and the hash by which runs of tokens are found again.
#pragma once

#include <cstddef>
#include <cstdint>

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

constexpr int kMaxMatchTokens = 32;  // longer agreement says nothing more about the next token

inline uint32_t hash_gram(const Token* gram, int gram_tokens) {
    uint64_t hash = 0x9E3779B97F4A7C15ull;
    for (int i = 0; i < gram_tokens; ++i) {
        hash = (hash ^ static_cast<uint32_t>(gram[i])) * 0xD6E8FEB86659FD93ull;
    }
    return static_cast<uint32_t>(hash >> 32);
}

// How many tokens before `text` equal those before `tail`; at most `limit` are looked at.
inline int common_suffix(const Token* text, const Token* tail, int limit) {
    int length = 0;
    while (length < limit && text[-1 - length] == tail[-1 - length]) ++length;
    return length;
}

}  // namespace rhyme
