// What the running requests of one prompt have generated so far (siblings of a group on one replica), searchable while
// it grows; the prompt itself is its first text. Used by the drafting thread only, so it has no lock.
//
// A position is kLive | text << kOffsetBits | offset. Runs of tokens are chained as in PromptHistory.
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

    // Start a text; returns its number, or -1 when the group is full.
    int open();
    // Add what a text has got. Ignores text -1.
    void append(int text, Span<Token> added);

    // kEnd where nothing has been generated yet. Valid until the text grows.
    const Token* address(Position position) const {
        return texts_[text_of(position)].tokens.data() + (position & kOffsetMask);
    }

    // As PromptHistory's. `text` is the asking request's own: where it stands now is not a match.
    size_t find_suffix(Span<Token> context, int text, Match* matches, size_t max_matches) const;

    // Places of the first tokens of all texts but the prompt and `text`, newest first.
    size_t starts(int text, Position* places, size_t max_places) const;

    // What followed the last few tokens in any of the texts.
    const ContextCounts& counts() const { return counts_; }

    int num_texts() const { return static_cast<int>(texts_.size()) - 1; }
    int64_t num_tokens() const { return num_tokens_; }

    // Empty if all invariants hold, else what is wrong.
    const char* check_integrity() const;

  private:
    static constexpr int kOffsetBits = 22;
    static constexpr Position kOffsetMask = (1u << kOffsetBits) - 1;
    static constexpr size_t kMaxTexts = 1u << (31 - kOffsetBits);

    struct Text {
        std::vector<Token> tokens{kEnd};  // always closed by kEnd

        size_t size() const { return tokens.size() - 1; }
        std::vector<Position> prev;  // prev[i]: an earlier place after a gram with the hash of the one that ends in token i
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
