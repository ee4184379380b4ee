// Owns the groups of running answers (LiveGroup), one per prompt, within a hard bound on their tokens.
//
// Requests join and leave the group of their prompt. A group that all requests have left is kept until the prompt's history
// has its answers, or until its memory is needed. Beyond the bound, such groups are removed, oldest first; then the largest
// group is cleared. While a request is in a group, the group neither ends nor moves in memory, so a request may keep the
// pointer from join() until it leaves. Not thread-safe.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>

#include "history_index.h"
#include "live_group.h"

namespace rhyme {

class Siblings {
  public:
    explicit Siblings(int64_t max_tokens) : max_tokens_(max_tokens) {}

    // Whether a prompt with this key has a group.
    bool has(PromptKey key) const { return lengths_.has(HistoryIndex::length_of(key)) && groups_.count(key) > 0; }

    // Joins the prompt's group. The pointer is valid until the matching leave(). `prompt` is copied; `version` is that of
    // the prompt's history.
    LiveGroup* join(PromptKey key, Span<Token> prompt, uint64_t version);
    // `text`: of the request, if it has one, else 0 or -1.
    void leave(PromptKey key, int text);

    // LiveGroup::enter and append in a joined group. They may clear this or another group.
    int enter(LiveGroup& group, Span<Token> answer, size_t max_tokens);
    void append(LiveGroup& group, int text, Span<Token> added);

    // Makes tokens searchable that came many at once: a bounded number of them.
    void catch_up();

    int64_t num_tokens() const { return num_tokens_; }

    // Returns a static string: empty if all invariants hold, otherwise what is wrong.
    const char* check_integrity() const;

  private:
    struct Group {
        std::unique_ptr<LiveGroup> texts;
        int num_open = 0;
        bool is_queued = false;  // whether it is in finished_
        uint64_t version = 0;  // of the prompt's history when the group began
    };

    template <typename Change>
    void change(LiveGroup& group, Change change);
    void remove(PromptKey key, Group& group);
    void trim();

    int64_t max_tokens_;  // of all groups
    std::unordered_map<PromptKey, Group> groups_;
    LengthCounts lengths_;  // of the prompts that have a group
    std::deque<PromptKey> finished_;  // groups that ended, oldest first, each once; some may run again
    std::deque<LiveGroup*> behind_;  // groups with tokens that are not searchable yet, and some others
    int64_t num_tokens_ = 0;  // of all groups, with kGroupTokens for each
};

}  // namespace rhyme
