#include "live_group.h"

#include <algorithm>

namespace rhyme {

namespace {

constexpr size_t kInitialBuckets = 256;
constexpr int kMaxCandidates = 32;            // positions visited per search
constexpr size_t kMaxAtOnce = 128;            // tokens that become searchable at once; a step's are never more
constexpr size_t kMaxReserved = 1u << 16;     // tokens of a text that have room from its beginning on
constexpr size_t kMaxSurplus = 256;           // tokens that a text may have and its interrupted answer may not
constexpr size_t kMinOfInterrupted = 32;      // tokens, at least, of an answer that is interrupted like this

}  // namespace

LiveGroup::LiveGroup(Span<Token> prompt) : newest_(kInitialBuckets), counts_(kInitialBuckets) {
    texts_.emplace_back();
    append(0, prompt.first(std::min<size_t>(prompt.size(), kOffsetMask)));
}

int LiveGroup::enter(Span<Token> answer, size_t max_tokens) {
    size_t best = 0;
    for (size_t i = 1; i < texts_.size(); ++i) {
        const Text& text = texts_[i];
        if (!text.is_left || (best > 0 && text.size() <= texts_[best].size())) continue;
        const size_t least = text.size() < kMinOfInterrupted + kMaxSurplus ? kMinOfInterrupted : text.size() - kMaxSurplus;
        if (text.size() > answer.size() && answer.size() < least) continue;
        const size_t common = std::min(text.size(), answer.size());
        if (std::equal(answer.begin(), answer.begin() + common, text.tokens.begin())) best = i;
    }
    if (best == 0) {
        if (texts_.size() == kMaxTexts) return -1;
        best = texts_.size();
        texts_.emplace_back();
    }
    Text& text = texts_[best];
    text.is_left = false;
    text.tokens.reserve(std::min(max_tokens, kMaxReserved) + 1);  // so that no step copies it
    text.prev.reserve(std::min(max_tokens, kMaxReserved));
    if (answer.size() > text.size()) append(static_cast<int>(best), answer.subspan(text.size()));
    return static_cast<int>(best);
}

void LiveGroup::append(int text, Span<Token> added) {
    if (text < 0) return;
    Text& one = texts_[static_cast<size_t>(text)];
    if (one.size() + added.size() > kOffsetMask) return;
    const bool was_behind = one.num_indexed() < one.size();
    one.tokens.insert(one.tokens.end() - 1, added.begin(), added.end());
    num_tokens_ += static_cast<int64_t>(added.size());
    if (!was_behind && added.size() <= kMaxAtOnce) index_tokens(static_cast<size_t>(text), added.size());
}

size_t LiveGroup::catch_up(size_t most) {
    size_t left = most;
    for (size_t i = 0; i < texts_.size() && left > 0; ++i) {
        const size_t count = std::min(left, texts_[i].size() - texts_[i].num_indexed());
        index_tokens(i, count);
        left -= count;
    }
    return most - left;
}

void LiveGroup::clear() {
    for (Text& text : texts_) {
        Text empty;
        empty.is_left = text.is_left;
        text = std::move(empty);
    }
    newest_ = NewestLivePlaces(kInitialBuckets);
    counts_ = LiveCounts(kInitialBuckets);
    num_tokens_ = num_indexed_ = 0;
    ++num_clears_;
}

void LiveGroup::index_tokens(size_t text, size_t count) {
    Text& one = texts_[text];
    const size_t begin = one.num_indexed(), last = begin + count;
    one.prev.resize(last, kNowhere);
    for (size_t end = std::max(begin + 1, kGramTokens); end <= last; ++end) {
        const Position place = kLive | static_cast<Position>(text << kOffsetBits) | static_cast<Position>(end);
        one.prev[end - 1] = newest_.replace(one.tokens.data() + end, place);
    }
    count_contexts({one.tokens.data(), last}, begin, kMaxLocalOrder, counts_);
    num_indexed_ += static_cast<int64_t>(count);
    while (newest_.num_buckets() < static_cast<size_t>(num_indexed_)) newest_.grow();
    while (counts_.num_contexts() < static_cast<size_t>(num_indexed_)) counts_.grow();
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
    int64_t num_tokens = 0, num_indexed = 0;
    bool all_exist = true;
    const auto check = [&](Position place) {
        all_exist &= place == kNowhere ||
                     (text_of(place) < texts_.size() && (place & kOffsetMask) <= texts_[text_of(place)].num_indexed());
    };
    for (const Text& text : texts_) {
        num_tokens += static_cast<int64_t>(text.size());
        num_indexed += static_cast<int64_t>(text.num_indexed());
        if (text.tokens.back() != kEnd) return "a text is not closed by kEnd";
        if (text.num_indexed() > text.size()) return "a text has more chains than tokens";
        for (const Position place : text.prev) check(place);
    }
    newest_.for_each(check);
    if (!all_exist) return "a chain leads to a position that does not exist";
    if (!counts_.is_in_order()) return "followers of a context are out of order";
    return num_tokens == num_tokens_ && num_indexed == num_indexed_ ? "" : "the number of tokens is wrong";
}

}  // namespace rhyme
