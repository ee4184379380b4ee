#include "live_group.h"

#include <algorithm>

namespace rhyme {

namespace {

constexpr size_t kInitialBuckets = 256;
constexpr int kMaxCandidates = 16;  // places looked at in one search

}  // namespace

LiveGroup::LiveGroup(int gram_tokens, Span<Token> prompt) : gram_tokens_(gram_tokens), heads_(kInitialBuckets, kNowhere) {
    texts_.emplace_back();
    append(0, prompt.first(std::min<size_t>(prompt.size(), kOffsetMask)));
}

int LiveGroup::open() {
    if (texts_.size() == kMaxTexts) return -1;
    texts_.emplace_back();
    return static_cast<int>(texts_.size()) - 1;
}

void LiveGroup::append(int text, Span<Token> added) {
    if (text < 0) return;
    Text& one = texts_[static_cast<size_t>(text)];
    const size_t begin = one.size();
    if (begin + added.size() > kOffsetMask) return;
    one.tokens.insert(one.tokens.end() - 1, added.begin(), added.end());
    num_tokens_ += static_cast<int64_t>(added.size());
    if (static_cast<size_t>(num_tokens_) > heads_.size()) {
        grow_table();
    } else {
        chain(static_cast<size_t>(text), begin);
    }
}

void LiveGroup::chain(size_t text, size_t begin) {
    Text& one = texts_[text];
    const size_t gram = static_cast<size_t>(gram_tokens_);
    one.prev.resize(one.size(), kNowhere);
    for (size_t end = std::max(begin + 1, gram); end <= one.size(); ++end) {
        Position& head = heads_[bucket_of(&one.tokens[end - gram])];
        one.prev[end - 1] = head;
        head = kLive | static_cast<Position>(text << kOffsetBits) | static_cast<Position>(end);
    }
}

void LiveGroup::grow_table() {
    heads_.assign(heads_.size() * 4, kNowhere);
    for (size_t text = 0; text < texts_.size(); ++text) chain(text, 0);
}

size_t LiveGroup::find_suffix(Span<Token> context, int text, Match* matches, size_t max_matches) const {
    if (context.size() < static_cast<size_t>(gram_tokens_)) return 0;
    const Token* tail = context.end();
    size_t found = 0;
    Position place = heads_[bucket_of(tail - gram_tokens_)];
    for (int looked = 0; place != kNowhere && looked < kMaxCandidates && found < max_matches; ++looked) {
        const Text& there = texts_[text_of(place)];
        const size_t offset = place & kOffsetMask;
        const bool itself = static_cast<int>(text_of(place)) == text && offset == there.size();
        const int limit = static_cast<int>(std::min<size_t>({context.size(), offset, kMaxMatchTokens}));
        const int length = itself ? 0 : common_suffix(there.tokens.data() + offset, tail, limit);
        if (length >= gram_tokens_) matches[found++] = {place, length};
        place = there.prev[offset - 1];
    }
    return found;
}

size_t LiveGroup::starts(int text, Position* places, size_t max_places) const {
    size_t count = 0;
    for (size_t other = texts_.size() - 1; other > 0 && count < max_places; --other) {
        if (static_cast<int>(other) != text) places[count++] = kLive | static_cast<Position>(other << kOffsetBits);
    }
    return count;
}

}  // namespace rhyme
