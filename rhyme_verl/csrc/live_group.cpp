#include "live_group.h"

#include <algorithm>

namespace rhyme {

namespace {

constexpr size_t kInitialBuckets = 256;
constexpr int kMaxCandidates = 32;  // positions visited per search

}  // namespace

LiveGroup::LiveGroup(Span<Token> prompt) : newest_(kInitialBuckets), counts_(kInitialBuckets) {
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
    if (static_cast<size_t>(num_tokens_) > newest_.num_buckets()) {
        grow();
    } else {
        index_tokens(static_cast<size_t>(text), begin);
    }
}

void LiveGroup::index_tokens(size_t text, size_t begin) {
    Text& one = texts_[text];
    one.prev.resize(one.size(), kNowhere);
    for (size_t end = std::max(begin + 1, kGramTokens); end <= one.size(); ++end) {
        const Position place = kLive | static_cast<Position>(text << kOffsetBits) | static_cast<Position>(end);
        one.prev[end - 1] = newest_.replace(one.tokens.data() + end, place);
    }
    count_contexts({one.tokens.data(), one.size()}, begin, kMaxLocalOrder, counts_);
}

void LiveGroup::grow() {
    size_t num_buckets = newest_.num_buckets();
    while (num_buckets < static_cast<size_t>(num_tokens_)) num_buckets *= 4;
    newest_ = NewestPlaces(num_buckets);
    counts_ = ContextCounts(num_buckets);
    for (size_t text = 0; text < texts_.size(); ++text) index_tokens(text, 0);
}

size_t LiveGroup::find_suffix(Span<Token> context, int text, Match* matches, size_t max_matches) const {
    if (context.size() < kGramTokens) return 0;
    const Token* tail = context.end();
    size_t found = 0;
    Position place = newest_.find(tail);
    for (int looked = 0; place != kNowhere && looked < kMaxCandidates && found < max_matches; ++looked) {
        const Text& there = texts_[text_of(place)];
        const size_t offset = place & kOffsetMask;
        const bool itself = static_cast<int>(text_of(place)) == text && offset == there.size();
        const int limit = static_cast<int>(std::min<size_t>({context.size(), offset, kMaxMatchTokens}));
        const int length = itself ? 0 : common_suffix(there.tokens.data() + offset, tail, limit);
        if (static_cast<size_t>(length) >= kGramTokens) matches[found++] = {place, length};
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

const char* LiveGroup::check_integrity() const {
    int64_t num_tokens = 0;
    for (const Text& text : texts_) {
        num_tokens += static_cast<int64_t>(text.size());
        if (text.tokens.back() != kEnd) return "a text is not closed by kEnd";
        if (text.prev.size() != text.size()) return "chains and tokens differ in length";
        for (const Position place : text.prev) {
            if (place == kNowhere) continue;
            if (text_of(place) >= texts_.size()) return "a chain leads to a text that does not exist";
            if ((place & kOffsetMask) > texts_[text_of(place)].size()) return "a chain leads beyond the end of a text";
        }
    }
    return num_tokens == num_tokens_ ? "" : "the number of tokens is wrong";
}

}  // namespace rhyme
