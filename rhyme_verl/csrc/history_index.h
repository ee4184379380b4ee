// The histories of all prompts of a replica, within a hard memory bound.
//
// A prompt's key combines a hash of its token ids with its length. The hash is built token by token, so one pass over a
// longer prompt yields the keys of all its prefixes. A resumed request (the prompt and what was generated) or a later turn
// of a conversation thus finds the history of its first prompt. Only lengths that some known prompt has are looked up.
// Thread-safe: one thread may update while others read, and neither waits for the other's work.
#pragma once

#include <algorithm>
#include <atomic>
#include <bitset>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "prompt_history.h"

namespace rhyme {

// The present history of one prompt. A request that holds it keeps it alive after the index has evicted it.
struct HistoryEntry {
    std::atomic<uint64_t> version{0};  // increases with every new history
    std::atomic<bool> is_evicted{false};  // from the index, so that it gets no new history
    std::shared_ptr<const PromptHistory> history;  // accessed with std::atomic_load and std::atomic_store
    std::list<PromptKey>::iterator age;  // in HistoryIndex::by_age_
};

struct FoundEntry {
    std::shared_ptr<const HistoryEntry> entry;  // null if no prefix of the prompt is known
    PromptKey key = 0;  // of the known prompt
    size_t prompt_tokens = 0;  // its length; the request's other tokens are answer
};

struct IndexStats {
    int64_t num_prompts = 0;
    int64_t num_answers = 0;
    int64_t num_tokens = 0;
    int64_t num_bytes = 0;
    int64_t num_evicted_tokens = 0;  // total that was evicted to stay within max_bytes
};

constexpr uint64_t kMaxLength = (1u << 20) - 1;  // in a key's low bits; longer prompts share this value

// Which lengths prompts have had, so that prefixes of any other length need not be looked up.
using PromptLengths = std::bitset<kMaxLength + 1>;

class HistoryIndex {
  public:
    explicit HistoryIndex(const HistoryLimits& limits) : limits_(limits) {}

    static PromptKey key_of(Span<Token> prompt) {
        PromptKey key = 0;
        for_each_prefix(prompt, [&](PromptKey prefix, size_t) { key = prefix; });
        return key;
    }

    static size_t length_of(PromptKey key) { return key & kMaxLength; }

    // Calls visit(key, length) for every prefix of `prompt`, shortest first.
    template <typename Visit>
    static void for_each_prefix(Span<Token> prompt, Visit visit) {
        uint64_t state = 0xCBF29CE484222325ull;
        for (size_t i = 0; i < prompt.size(); ++i) {
            state = (state ^ static_cast<uint32_t>(prompt[i])) * 0xFF51AFD7ED558CCDull;
            state ^= state >> 29;
            const uint64_t mixed = state * 0xC4CEB9FE1A85EC53ull;
            visit(((mixed ^ (mixed >> 33)) << 20) | std::min<uint64_t>(i + 1, kMaxLength), i + 1);
        }
    }

    // Copies finished answers into a prompt's history, and evicts the least recently updated prompts beyond max_bytes; those
    // that requests use go last.
    void update(PromptKey prompt, const AnswerBatch& batch) {
        std::lock_guard<std::mutex> updating(update_mutex_);
        const std::shared_ptr<const HistoryEntry> known = find(prompt);
        const std::shared_ptr<const PromptHistory> old = known ? known->history : nullptr;
        std::shared_ptr<const PromptHistory> history = PromptHistory::merge(old.get(), batch, limits_);
        if (history->num_answers() == 0) return;

        std::lock_guard<std::mutex> lock(mutex_);
        std::shared_ptr<HistoryEntry>& entry = entries_[prompt];
        if (!known) {
            entry = std::make_shared<HistoryEntry>();
            entry->age = by_age_.insert(by_age_.end(), prompt);
            has_length_[length_of(prompt)] = true;
        }
        std::atomic_store(&entry->history, history);
        ++entry->version;
        if (!known) ++num_created_;
        if (old) account(*old, -1);
        account(*history, 1);
        by_age_.splice(by_age_.end(), by_age_, entry->age);
        evict(entry.get());
    }

    // Returns the history of the longest known prefix of `prompt`.
    FoundEntry find(Span<Token> prompt) const {
        FoundEntry found;
        std::lock_guard<std::mutex> lock(mutex_);
        for_each_prefix(prompt, [&](PromptKey key, size_t length) {
            if (!has_length_[length_of(key)]) return;
            auto known = entries_.find(key);
            if (known != entries_.end()) found = {known->second, key, length};
        });
        return found;
    }

    // Returns the history of exactly this prompt, or null.
    std::shared_ptr<const HistoryEntry> find(PromptKey prompt) const {
        std::lock_guard<std::mutex> lock(mutex_);
        auto known = entries_.find(prompt);
        return known == entries_.end() ? nullptr : known->second;
    }

    // Increases whenever a prompt becomes known.
    uint64_t num_created() const { return num_created_; }

    IndexStats stats() const {
        std::lock_guard<std::mutex> lock(mutex_);
        IndexStats stats = totals_;
        stats.num_prompts = static_cast<int64_t>(entries_.size());
        return stats;
    }

    const char* check_integrity() const {
        std::lock_guard<std::mutex> lock(mutex_);
        IndexStats sums;
        for (const auto& [key, entry] : entries_) {
            if (const char* problem = entry->history->check_integrity(); *problem) return problem;
            sums.num_tokens += entry->history->num_tokens();
            sums.num_bytes += entry->history->num_bytes();
        }
        if (sums.num_tokens != totals_.num_tokens || sums.num_bytes != totals_.num_bytes) return "the totals are wrong";
        if (by_age_.size() != entries_.size()) return "the order of updates and the prompts differ in number";
        return "";
    }

  private:
    void account(const PromptHistory& history, int sign) {
        totals_.num_answers += sign * history.num_answers();
        totals_.num_tokens += sign * history.num_tokens();
        totals_.num_bytes += sign * history.num_bytes();
    }

    // What requests use would stay in memory.
    void evict(const HistoryEntry* spared) {
        for (const bool evicts_used : {false, true}) {
            for (auto key = by_age_.begin(); key != by_age_.end() && totals_.num_bytes > limits_.max_bytes;) {
                const auto oldest = entries_.find(*key);
                const std::shared_ptr<HistoryEntry>& entry = oldest->second;
                const bool is_used = entry.use_count() > 1;
                if (entry.get() == spared || (is_used && !evicts_used)) {  // max_tokens_per_prompt bounds a single prompt
                    ++key;
                    continue;
                }
                account(*entry->history, -1);
                totals_.num_evicted_tokens += entry->history->num_tokens();
                entry->is_evicted = true;
                key = by_age_.erase(key);
                entries_.erase(oldest);
            }
        }
    }

    HistoryLimits limits_;
    mutable std::mutex mutex_;  // guards the members below; never held while a history is built
    std::mutex update_mutex_;  // one update at a time
    std::unordered_map<PromptKey, std::shared_ptr<HistoryEntry>> entries_;
    std::list<PromptKey> by_age_;  // least recently updated first
    PromptLengths has_length_;  // of prompts that are known or were
    IndexStats totals_;
    std::atomic<uint64_t> num_created_{0};
};

}  // namespace rhyme
