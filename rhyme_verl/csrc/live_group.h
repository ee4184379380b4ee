// What the running requests of one prompt (siblings on one replica) have generated, searchable while it grows.
//
// Text 0 is the prompt; each answer has one text, whatever turns and interruptions it goes through. A position is
// kLive | text << kOffsetBits | offset. Runs of tokens are chained as in PromptHistory. Many tokens at once (a prompt, a
// resumed answer) become searchable later, some in each step.
//
// Siblings owns the group. Positions stay valid until the group is cleared; addresses only until their text grows. There is
// no lock: the drafting thread alone changes the group, and its row threads read only while it does not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "context_counts.h"
#include "tokens.h"

namespace rhyme {

class LiveGroup {
  public:
    explicit LiveGroup(Span<Token> prompt) : newest_(kInitialBuckets), counts_(kInitialBuckets) {
        texts_.emplace_back();
        append(0, prompt.first(std::min<size_t>(prompt.size(), kOffsetMask)));
    }

    // Returns the text of an answer that begins with these tokens: the one that such an answer has left, or a new one; -1
    // if the group is full. `max_tokens`: maximum length of the answer.
    int enter(Span<Token> answer, size_t max_tokens) {
        size_t best = 0;
        for (size_t i = 1; i < texts_.size(); ++i) {
            const Text& text = texts_[i];
            if (!text.is_left || (best > 0 && text.size() <= texts_[best].size())) continue;
            const size_t least = std::max(text.size(), kMinOfInterrupted + kMaxSurplus) - kMaxSurplus;
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

    // The answer may come back. Until then, its text takes no more memory than its tokens.
    void leave(int text) {
        Text& one = texts_[static_cast<size_t>(text)];
        one.is_left = true;
        one.tokens.shrink_to_fit();
        one.prev.shrink_to_fit();
    }

    // Copies a text's newest tokens. Ignores text -1, and tokens that would make a text longer than kOffsetMask.
    void append(int text, Span<Token> added) {
        if (text < 0) return;
        Text& one = texts_[static_cast<size_t>(text)];
        if (one.size() + added.size() > kOffsetMask) return;
        const bool was_behind = one.num_indexed() < one.size();
        one.tokens.insert(one.tokens.end() - 1, added.begin(), added.end());
        num_tokens_ += static_cast<int64_t>(added.size());
        if (!was_behind && added.size() <= kMaxAtOnce) index_tokens(static_cast<size_t>(text), added.size());
    }

    // Makes at most `most` tokens searchable that are not yet, and returns how many.
    size_t catch_up(size_t most) {
        size_t left = most;
        for (size_t i = 0; i < texts_.size() && left > 0; ++i) {
            const size_t count = std::min(left, texts_[i].size() - texts_[i].num_indexed());
            index_tokens(i, count);
            left -= count;
        }
        return most - left;
    }

    bool is_behind() const { return num_indexed_ < num_tokens_; }

    // Removes all tokens. The texts stay, empty.
    void clear() {
        for (Text& text : texts_) text = Text{{kEnd}, {}, text.is_left};
        newest_ = NewestLivePlaces(kInitialBuckets);
        counts_ = LiveCounts(kInitialBuckets);
        num_tokens_ = num_indexed_ = 0;
        ++num_clears_;
    }

    // Points to kEnd where nothing has been generated yet. Valid until the text grows.
    const Token* address(Position position) const {
        return texts_[text_of(position)].tokens.data() + (position & kOffsetMask);
    }

    // Like PromptHistory::find_suffix. `text` is the caller's own text, whose present end is not a match.
    template <typename Visit>
    void find_suffix(Span<Token> context, int text, size_t max_matches, Visit visit) const {
        const auto spot_of = [&](Position place) -> NewestLivePlaces::Spot {
            const Text& there = texts_[text_of(place)];
            const size_t offset = place & kOffsetMask;
            const bool itself = is_in(text, place) && offset == there.size();
            return {there.tokens.data() + offset, itself ? 0 : offset, there.prev[offset - 1]};
        };
        newest_.find(context, max_matches, spot_of, visit);
    }

    // Calls visit(position) for the first tokens of the newest answers, newest first.
    template <typename Visit>
    void for_each_start(size_t most, Visit visit) const {
        const size_t last = texts_.size() - 1 - std::min(most, texts_.size() - 1);
        for (size_t text = texts_.size() - 1; text > last; --text) visit(position_of(text, 0));
    }

    static bool is_in(int text, Position position) {
        return (position & kLive) && text >= 0 && text_of(position) == static_cast<size_t>(text);
    }

    // Counts over all texts. The reference is valid as long as the group; what is found in it, until the next change.
    const LiveCounts& counts() const { return counts_; }

    int num_clears() const { return num_clears_; }
    int num_texts() const { return static_cast<int>(texts_.size()) - 1; }
    int64_t num_tokens() const { return num_tokens_; }

    const char* check_integrity() const {
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
        std::ranges::for_each(newest_.buckets(), check);
        if (!all_exist) return "a chain leads to a position that does not exist";
        if (!counts_.is_in_order()) return "followers of a context are out of order";
        return num_tokens == num_tokens_ && num_indexed == num_indexed_ ? "" : "the number of tokens is wrong";
    }

  private:
    static constexpr size_t kInitialBuckets = 256;
    static constexpr size_t kMaxAtOnce = 128;  // tokens that become searchable at once; a step's are never more
    static constexpr size_t kMaxReserved = 1u << 16;  // tokens of a text that have room from its beginning on
    static constexpr size_t kMaxSurplus = 256;  // tokens that a text may have and its interrupted answer may not
    static constexpr size_t kMinOfInterrupted = 32;  // tokens, at least, of an answer that is interrupted like this
    static constexpr int kOffsetBits = 22;
    static constexpr Position kOffsetMask = (1u << kOffsetBits) - 1;
    static constexpr size_t kMaxTexts = 1u << (31 - kOffsetBits);

    struct Text {
        std::vector<Token> tokens{kEnd};  // closed by kEnd
        std::vector<Position> prev;  // prev[i]: an earlier position after a gram with the hash of the one that ends at i
        bool is_left = false;  // no request adds to it

        size_t size() const { return tokens.size() - 1; }
        size_t num_indexed() const { return prev.size(); }  // tokens that are searchable
    };

    static size_t text_of(Position position) { return (position & ~kLive) >> kOffsetBits; }
    static Position position_of(size_t text, size_t offset) {
        return kLive | static_cast<Position>(text << kOffsetBits) | static_cast<Position>(offset);
    }

    void index_tokens(size_t text, size_t count) {
        Text& one = texts_[text];
        const size_t begin = one.num_indexed(), last = begin + count;
        one.prev.resize(last, kNowhere);
        for (size_t end = std::max(begin + 1, kGramTokens); end <= last; ++end) {
            one.prev[end - 1] = newest_.replace(one.tokens.data() + end, position_of(text, end));
        }
        count_contexts({one.tokens.data(), last}, begin, kMaxLocalOrder, counts_);
        num_indexed_ += static_cast<int64_t>(count);
        while (newest_.buckets().size() < static_cast<size_t>(num_indexed_)) newest_.grow();
        while (counts_.num_contexts() < static_cast<size_t>(num_indexed_)) counts_.grow();
    }

    std::vector<Text> texts_;
    NewestLivePlaces newest_;
    LiveCounts counts_;
    int64_t num_tokens_ = 0;
    int64_t num_indexed_ = 0;
    int num_clears_ = 0;
};

}  // namespace rhyme
