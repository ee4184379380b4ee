// The groups of running answers to one prompt each (LiveGroup), by prompt.
//
// Requests join their prompt's group and leave it; a group that everybody has left stays until the prompt's history has
// its answers, or the room it takes is wanted. A group does not move in memory while a request is in it. Not thread-safe.
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

    // The prompt's group; valid until as many have left as joined. `version`: of the prompt's history.
    LiveGroup* join(PromptKey key, Span<Token> prompt, uint64_t version);
    void leave(PromptKey key);

    // Add what a text of a joined group has got.
    void append(LiveGroup& group, int text, Span<Token> added);

    // Empty if all invariants hold, else what is wrong.
    const char* check_integrity() const;

  private:
    struct Group {
        std::unique_ptr<LiveGroup> texts;
        int num_open = 0;
        bool is_queued = false;  // in finished_
        uint64_t version = 0;    // of the prompt's history when the group was begun
    };

    void remove(PromptKey key, Group& group);
    void trim();

    int64_t max_tokens_;  // of all groups; over it, those that everybody has left go
    std::unordered_map<PromptKey, Group> groups_;
    LengthCounts lengths_;            // of their prompts
    std::deque<PromptKey> finished_;  // in the order of their first end, each once; may name groups that run again
    int64_t num_tokens_ = 0;
};

}  // namespace rhyme
