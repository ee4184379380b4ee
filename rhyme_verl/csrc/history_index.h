// The histories of all prompts, by prompt.
//
// A prompt is identified by a 64-bit hash of its token ids. The hash is built token by token, so the hashes of all
// prefixes of a longer prompt come for free: a resumed request (prompt + what it had generated) or a later turn of a
// conversation still finds the history of its first prompt. Thread-safe; a history outlives its removal while in use.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "prompt_history.h"

namespace rhyme {

using PromptKey = uint64_t;

struct IndexStats {
    int64_t num_prompts = 0;
    int64_t num_answers = 0;
    int64_t num_tokens = 0;
    int64_t num_bytes = 0;
};

struct FoundHistory {
    std::shared_ptr<PromptHistory> history;  // null: no prefix of the prompt is known
    size_t prompt_tokens = 0;                // length of the known prompt; the rest of the request is answer
};

class HistoryIndex {
  public:
    explicit HistoryIndex(const HistoryLimits& limits) : limits_(limits) {}

    static PromptKey key_of(Span<Token> prompt);

    void add(PromptKey prompt, Span<Token> answer, int64_t step);

    // The history of the longest known prefix of `prompt`.
    FoundHistory find(Span<Token> prompt) const;

    IndexStats stats() const;
    const char* check_integrity() const;

  private:
    HistoryLimits limits_;
    mutable std::mutex mutex_;  // guards the map, not the histories
    std::unordered_map<PromptKey, std::shared_ptr<PromptHistory>> histories_;
};

}  // namespace rhyme
