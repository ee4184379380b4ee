// What the running requests of one prompt (siblings on one replica) have generated, searchable while it grows.
//
// Text 0 is the prompt; each answer has one text, whatever turns and interruptions it goes through. A position is
// kLive | text << kOffsetBits | offset. Runs of tokens are chained as in PromptHistory. Many tokens at once (a prompt, a
// resumed answer) become searchable later, some in each step.
//
// Siblings owns the group. Positions stay valid until the group is cleared; addresses only until their text grows. There is
// no lock: the drafting thread alone changes the group, and its row threads read only while it does not.
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

    // Returns the text of an answer that begins with these tokens: the one that such an answer has left, or a new one; -1 if
    // the group is full. `max_tokens`: maximum length of the answer.
    int enter(Span<Token> answer, size_t max_tokens);
    // The answer may come back.
    void leave(int text) { texts_[static_cast<size_t>(text)].is_left = true; }
    // Copies a text's newest tokens. Ignores text -1, and tokens that would make a text longer than kOffsetMask.
    void append(int text, Span<Token> added);
    // Makes at most `most` tokens searchable that are not yet, and returns how many.
    size_t catch_up(size_t most);
    bool is_behind() const { return num_indexed_ < num_tokens_; }
    // Removes all tokens. The texts stay, empty.
    void clear();

    // Points to kEnd where nothing has been generated yet. Valid until the text grows.
    const Token* address(Position position) const {
        return texts_[text_of(position)].tokens.data() + (position & kOffsetMask);
    }

    // Like PromptHistory::find_suffix. `text` is the caller's own text, whose present end is not a match.
    size_t find_suffix(Span<Token> context, int text, Match* matches, size_t max_matches) const;

    // Writes the positions of the first tokens of all texts but the prompt and `text`, newest first. Returns how many.
    size_t starts(int text, Position* places, size_t max_places) const;

    static bool is_in(int text, Position position) {
        return (position & kLive) && text >= 0 && text_of(position) == static_cast<size_t>(text);
    }

    // Counts over all texts. The reference is valid as long as the group; what is found in it, until the next change.
    const LiveCounts& counts() const { return counts_; }

    int num_clears() const { return num_clears_; }
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
        std::vector<Position> prev;  // prev[i]: an earlier position after a gram with the hash of the one that ends at i
        bool is_left = false;  // no request adds to it

        size_t size() const { return tokens.size() - 1; }
        size_t num_indexed() const { return prev.size(); }  // tokens that are searchable
    };

    static size_t text_of(Position position) { return (position & ~kLive) >> kOffsetBits; }
    void index_tokens(size_t text, size_t count);

    std::vector<Text> texts_;
    NewestLivePlaces newest_;
    LiveCounts counts_;
    int64_t num_tokens_ = 0;
    int64_t num_indexed_ = 0;
    int num_clears_ = 0;
};

}  // namespace rhyme
