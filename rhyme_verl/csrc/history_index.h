// The histories of all prompts of a replica, within a hard memory bound.
//
// A prompt's key combines a hash of its token ids with its length. The hash is built token by token, so one pass over a
// longer prompt yields the keys of all its prefixes. A resumed request (the prompt and what was generated) or a later turn
// of a conversation thus finds the history of its first prompt. Only lengths that some known prompt has are looked up.
// Thread-safe: one thread may update while others read, and neither waits for the other's work.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "prompt_history.h"

namespace rhyme {

// Counts prompts by length, so that prefixes of any other length need not be looked up.
class LengthCounts {
  public:
    void add(size_t length) {
        if (counts_.size() <= length) counts_.resize(length + 1);
        ++counts_[length];
    }
    void remove(size_t length) { --counts_[length]; }
    bool has(size_t length) const { return length < counts_.size() && counts_[length] > 0; }

  private:
    std::vector<uint32_t> counts_;
};

// The present history of one prompt. A request that holds it keeps it alive after the index has evicted it.
class HistoryEntry {
  public:
    // Increases with every new history.
    uint64_t version() const { return version_.load(std::memory_order_acquire); }
    // Whether the index has evicted it, so that it gets no new history.
    bool is_evicted() const { return is_evicted_.load(std::memory_order_acquire); }
    std::shared_ptr<const PromptHistory> history() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return history_;
    }

  private:
    friend class HistoryIndex;
    mutable std::mutex mutex_;  // held only to copy the pointer
    std::atomic<uint64_t> version_{0};
    std::atomic<bool> is_evicted_{false};
    std::shared_ptr<const PromptHistory> history_;
    std::list<PromptKey>::iterator age_;  // in HistoryIndex::by_age_
};

struct FoundEntry {
    std::shared_ptr<HistoryEntry> entry;  // null if no prefix of the prompt is known
    size_t prompt_tokens = 0;             // length of the known prompt; the request's other tokens are answer
};

struct IndexStats {
    int64_t num_prompts = 0;
    int64_t num_answers = 0;
    int64_t num_tokens = 0;
    int64_t num_bytes = 0;
    int64_t num_evicted_tokens = 0;  // total that was evicted to stay within max_bytes
};

class HistoryIndex {
  public:
    explicit HistoryIndex(const HistoryLimits& limits) : limits_(limits) {}

    static PromptKey key_of(Span<Token> prompt);
    static size_t length_of(PromptKey key) { return key & kMaxLength; }

    // Calls visit(key, length) for every prefix of `prompt`, shortest first.
    template <typename Visit>
    static void for_each_prefix(Span<Token> prompt, Visit visit);

    // Copies finished answers into a prompt's history, and evicts the least recently updated prompts beyond max_bytes.
    void update(PromptKey prompt, const AnswerBatch& batch);

    // Returns the history of the longest known prefix of `prompt`.
    FoundEntry find(Span<Token> prompt) const;

    // Returns the history of exactly this prompt, or null.
    std::shared_ptr<HistoryEntry> find(PromptKey prompt) const;

    // Increases whenever a prompt becomes known.
    uint64_t num_created() const { return num_created_.load(std::memory_order_acquire); }

    IndexStats stats() const;
    const char* check_integrity() const;  // as PromptHistory's

  private:
    static constexpr uint64_t kMaxLength = (1u << 20) - 1;  // in the key's low bits; longer prompts share this value

    void account(const PromptHistory& history, int sign);
    void evict(const HistoryEntry* spared);

    HistoryLimits limits_;
    mutable std::mutex mutex_;          // guards the members below; never held while a history is built
    std::mutex update_mutex_;           // one update at a time
    std::unordered_map<PromptKey, std::shared_ptr<HistoryEntry>> entries_;
    std::list<PromptKey> by_age_;       // least recently updated first
    LengthCounts lengths_;              // of known prompts
    IndexStats totals_;
    std::atomic<uint64_t> num_created_{0};
};

namespace detail {

constexpr uint64_t kKeySeed = 0xCBF29CE484222325ull;

inline uint64_t extend_key(uint64_t state, Token token) {
    state = (state ^ static_cast<uint32_t>(token)) * 0xFF51AFD7ED558CCDull;
    return state ^ (state >> 29);
}

inline PromptKey finish_key(uint64_t state, uint64_t length) {
    state *= 0xC4CEB9FE1A85EC53ull;
    return ((state ^ (state >> 33)) << 20) | length;
}

}  // namespace detail

template <typename Visit>
void HistoryIndex::for_each_prefix(Span<Token> prompt, Visit visit) {
    uint64_t state = detail::kKeySeed;
    for (size_t i = 0; i < prompt.size(); ++i) {
        state = detail::extend_key(state, prompt[i]);
        visit(detail::finish_key(state, i + 1 < kMaxLength ? i + 1 : kMaxLength), i + 1);
    }
}

}  // namespace rhyme
