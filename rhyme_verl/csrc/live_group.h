// What the running requests of one prompt (siblings on one replica) have generated, searchable while it grows.
//
// Text 0 is the prompt. A position is kLive | text << kOffsetBits | offset. Runs of tokens are chained as in PromptHistory.
// Siblings owns the group. Positions stay valid as long as the group; addresses only until their text grows. There is no
// lock: the drafting thread alone appends, and its row threads read only while nothing is appended.
#pragma once

#include <cstdint>
#include <vector>

#include "context_counts.h"
#include "span.h"
#include "tokens.h"

namespace rhyme {

class LiveGroup {
  public:
    explicit LiveGroup(Span<Token> prompt);

    // Starts a text and returns its number, or -1 if the group is full.
    int open();
    // Copies a text's newest tokens. Ignores text -1, and tokens that would make a text longer than kOffsetMask.
    void append(int text, Span<Token> added);

    // Points to kEnd where nothing has been generated yet. Valid until the text grows.
    const Token* address(Position position) const {
        return texts_[text_of(position)].tokens.data() + (position & kOffsetMask);
    }

    // Like PromptHistory::find_suffix. `text` is the caller's own text, whose present end is not a match.
    size_t find_suffix(Span<Token> context, int text, Match* matches, size_t max_matches) const;

    // Writes the positions of the first tokens of all texts but the prompt and `text`, newest first. Returns how many.
    size_t starts(int text, Position* places, size_t max_places) const;

    // Counts over all texts. The reference is valid as long as the group; what is found in it, until the next append.
    const ContextCounts& counts() const { return counts_; }

    int num_texts() const { return static_cast<int>(texts_.size()) - 1; }
    int64_t num_tokens() const { return num_tokens_; }

    // Returns a static string: empty if all invariants hold, otherwise what is wrong.
    const char* check_integrity() const;

  private:
    static constexpr int kOffsetBits = 22;
    static constexpr Position kOffsetMask = (1u << kOffsetBits) - 1;
    static constexpr size_t kMaxTexts = 1u << (31 - kOffsetBits);

    struct Text {
        std::vector<Token> tokens{kEnd};  // closed by kEnd

        size_t size() const { return tokens.size() - 1; }
        std::vector<Position> prev;  // prev[i]: an earlier position after a gram with the hash of the one that ends at i
    };

    static size_t text_of(Position position) { return (position & ~kLive) >> kOffsetBits; }
    void index_tokens(size_t text, size_t begin);
    void grow();

    std::vector<Text> texts_;
    NewestPlaces newest_;
    ContextCounts counts_;
    int64_t num_tokens_ = 0;
};

}  // namespace rhyme
