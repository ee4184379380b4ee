#include "history_index.h"

namespace rhyme {

PromptKey HistoryIndex::key_of(Span<Token> prompt) {
    PromptKey key = 0;
    for_each_prefix(prompt, [&](PromptKey prefix, size_t) { key = prefix; });
    return key;
}

void HistoryIndex::update(PromptKey prompt, const AnswerBatch& batch) {
    std::lock_guard<std::mutex> updating(update_mutex_);
    std::shared_ptr<HistoryEntry> entry;
    std::shared_ptr<const PromptHistory> old;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        auto known = entries_.find(prompt);
        if (known != entries_.end()) {
            entry = known->second;
            old = entry->history_;
        }
    }
    std::shared_ptr<const PromptHistory> history = PromptHistory::merge(old.get(), batch, limits_);
    if (history->num_answers() == 0) return;

    std::lock_guard<std::mutex> lock(mutex_);
    const bool created = !entry;
    if (created) {
        entry = std::make_shared<HistoryEntry>();
        entry->age_ = by_age_.insert(by_age_.end(), prompt);
        entries_[prompt] = entry;
        lengths_.add(length_of(prompt));
    }
    {
        std::lock_guard<std::mutex> entry_lock(entry->mutex_);
        entry->history_ = history;
    }
    entry->version_.fetch_add(1, std::memory_order_release);
    if (created) num_created_.fetch_add(1, std::memory_order_release);
    if (old) account(*old, -1);
    account(*history, 1);
    by_age_.splice(by_age_.end(), by_age_, entry->age_);
    evict(entry.get());
}

void HistoryIndex::account(const PromptHistory& history, int sign) {
    totals_.num_answers += sign * history.num_answers();
    totals_.num_tokens += sign * history.num_tokens();
    totals_.num_bytes += sign * history.num_bytes();
}

void HistoryIndex::evict(const HistoryEntry* spared) {
    while (totals_.num_bytes > limits_.max_bytes) {
        auto oldest = entries_.find(by_age_.front());
        if (oldest->second.get() == spared) return;  // max_tokens_per_prompt bounds a single prompt
        account(*oldest->second->history_, -1);
        totals_.num_evicted_tokens += oldest->second->history_->num_tokens();
        lengths_.remove(length_of(oldest->first));
        oldest->second->is_evicted_.store(true, std::memory_order_release);
        by_age_.pop_front();
        entries_.erase(oldest);
    }
}

FoundEntry HistoryIndex::find(Span<Token> prompt) const {
    FoundEntry found;
    std::lock_guard<std::mutex> lock(mutex_);
    for_each_prefix(prompt, [&](PromptKey key, size_t length) {
        if (!lengths_.has(length_of(key))) return;
        auto known = entries_.find(key);
        if (known != entries_.end()) found = {known->second, length};
    });
    return found;
}

std::shared_ptr<HistoryEntry> HistoryIndex::find(PromptKey prompt) const {
    std::lock_guard<std::mutex> lock(mutex_);
    auto known = entries_.find(prompt);
    return known == entries_.end() ? nullptr : known->second;
}

IndexStats HistoryIndex::stats() const {
    std::lock_guard<std::mutex> lock(mutex_);
    IndexStats stats = totals_;
    stats.num_prompts = static_cast<int64_t>(entries_.size());
    return stats;
}

const char* HistoryIndex::check_integrity() const {
    std::lock_guard<std::mutex> lock(mutex_);
    IndexStats sums;
    for (const auto& [key, entry] : entries_) {
        if (const char* problem = entry->history_->check_integrity(); *problem) return problem;
        sums.num_tokens += entry->history_->num_tokens();
        sums.num_bytes += entry->history_->num_bytes();
    }
    if (sums.num_tokens != totals_.num_tokens || sums.num_bytes != totals_.num_bytes) return "the totals are wrong";
    if (by_age_.size() != entries_.size()) return "the order of updates and the prompts differ in number";
    return "";
}

}  // namespace rhyme
