// Owns the groups of running answers (LiveGroup), one per prompt, within a hard bound on their tokens.
//
// Requests join and leave the group of their prompt. A group that all requests have left is kept until the prompt's history
// has its answers, or until its memory is needed. Beyond the bound, such groups are removed, oldest first; then the largest
// group is cleared. While a request is in a group, the group neither ends nor moves in memory, so a request may keep the
// pointer from join() until it leaves. Not thread-safe.
#pragma once

#include <algorithm>
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
    bool has(PromptKey key) const { return has_length_[HistoryIndex::length_of(key)] && groups_.contains(key); }

    // Joins the prompt's group. The pointer is valid until the matching leave(). `prompt` is copied; `version` is that of
    // the prompt's history.
    LiveGroup* join(PromptKey key, Span<Token> prompt, uint64_t version) {
        Group& group = groups_[key];
        const bool is_over = group.num_open == 0 && group.texts;
        if (is_over && (group.version != version || group.texts->num_texts() >= kMaxGroupTexts)) remove(group);
        ++group.num_open;
        if (!group.texts) {
            group.texts = std::make_unique<LiveGroup>(prompt);
            group.version = version;
            has_length_[HistoryIndex::length_of(key)] = true;
            num_tokens_ += kGroupTokens + group.texts->num_tokens();
            if (group.texts->is_behind()) behind_.push_back(group.texts.get());
            trim();
        }
        return group.texts.get();
    }

    // `text`: of the request, if it has one, else 0 or -1.
    void leave(PromptKey key, int text) {
        Group& group = groups_[key];
        if (text > 0) group.texts->leave(text);
        if (--group.num_open == 0 && !group.is_queued) {
            group.is_queued = true;
            finished_.push_back(key);
        }
        trim();
    }

    // Calls change(), which adds tokens to a joined group. This or another group may be cleared for them.
    template <typename Change>
    void grow(LiveGroup& group, Change change) {
        const bool was_behind = group.is_behind();
        num_tokens_ -= group.num_tokens();
        change();
        num_tokens_ += group.num_tokens();
        if (group.is_behind() && !was_behind) behind_.push_back(&group);
        trim();
    }

    // Makes tokens searchable that came many at once: a bounded number of them.
    void catch_up() {
        size_t left = kMaxCaughtUp;
        while (!behind_.empty()) {
            left -= behind_.front()->catch_up(left);
            if (behind_.front()->is_behind()) return;
            behind_.pop_front();
        }
    }

    int64_t num_tokens() const { return num_tokens_; }

    const char* check_integrity() const {
        int64_t num_tokens = 0;
        size_t num_queued = 0, num_behind = 0;
        bool is_empty = true;
        for (const auto& [key, group] : groups_) {
            if (!group.texts) return "a group has no texts";
            if (group.num_open == 0 && !group.is_queued) return "a group that has ended is not queued";
            if (const char* problem = group.texts->check_integrity(); *problem) return problem;
            num_tokens += kGroupTokens + group.texts->num_tokens();
            is_empty &= group.texts->num_tokens() == 0;
            num_queued += group.is_queued;
            num_behind += group.texts->is_behind();
        }
        if (num_tokens != num_tokens_) return "the number of live tokens is wrong";
        if (num_tokens > max_tokens_ && !is_empty) return "there are more live tokens than allowed";
        if (num_behind > behind_.size()) return "a group with tokens that are not searchable is forgotten";
        return num_queued == finished_.size() ? "" : "the queue of finished groups is wrong";
    }

  private:
    static constexpr int kMaxGroupTexts = 64;  // a finished group with this many texts is replaced when it is joined
    static constexpr int64_t kGroupTokens = 256;  // the memory of an empty group, in tokens
    static constexpr size_t kMaxCaughtUp = 4096;  // tokens per call of catch_up()

    struct Group {
        std::unique_ptr<LiveGroup> texts;
        int num_open = 0;
        bool is_queued = false;  // whether it is in finished_
        uint64_t version = 0;  // of the prompt's history when the group began
    };

    void remove(Group& group) {
        num_tokens_ -= kGroupTokens + group.texts->num_tokens();
        std::erase(behind_, group.texts.get());
        group.texts.reset();
    }

    void trim() {
        while (num_tokens_ > max_tokens_ && !finished_.empty()) {
            auto oldest = groups_.find(finished_.front());
            finished_.pop_front();
            oldest->second.is_queued = false;
            if (oldest->second.num_open > 0) continue;
            remove(oldest->second);
            groups_.erase(oldest);
        }
        while (num_tokens_ > max_tokens_) {
            const auto tokens_of = [](const auto& one) { return one.second.texts->num_tokens(); };
            const auto largest = std::ranges::max_element(groups_, {}, tokens_of);
            if (largest == groups_.end() || tokens_of(*largest) == 0) return;
            num_tokens_ -= tokens_of(*largest);
            largest->second.texts->clear();
        }
    }

    int64_t max_tokens_;  // of all groups
    std::unordered_map<PromptKey, Group> groups_;
    PromptLengths has_length_;  // of the prompts that have or had a group
    std::deque<PromptKey> finished_;  // groups that ended, oldest first, each once; some may run again
    std::deque<LiveGroup*> behind_;  // groups with tokens that are not searchable yet, and some others
    int64_t num_tokens_ = 0;  // of all groups, with kGroupTokens for each
};

}  // namespace rhyme
