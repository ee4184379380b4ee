#include "siblings.h"

#include <algorithm>

namespace rhyme {

namespace {

constexpr int kMaxGroupTexts = 64;         // a finished group with this many texts is replaced when it is joined
constexpr int64_t kGroupTokens = 256;      // the memory of an empty group, in tokens
constexpr size_t kMaxCaughtUp = 4096;      // tokens per call of catch_up()

}  // namespace

LiveGroup* Siblings::join(PromptKey key, Span<Token> prompt, uint64_t version) {
    Group& group = groups_[key];
    const bool is_over = group.num_open == 0 && group.texts;
    if (is_over && (group.version != version || group.texts->num_texts() >= kMaxGroupTexts)) remove(key, group);
    ++group.num_open;
    if (!group.texts) {
        group.texts = std::make_unique<LiveGroup>(prompt);
        group.version = version;
        lengths_.add(HistoryIndex::length_of(key));
        num_tokens_ += kGroupTokens + group.texts->num_tokens();
        if (group.texts->is_behind()) behind_.push_back(group.texts.get());
        trim();
    }
    return group.texts.get();
}

void Siblings::leave(PromptKey key, int text) {
    Group& group = groups_[key];
    if (text > 0) group.texts->leave(text);
    if (--group.num_open == 0 && !group.is_queued) {
        group.is_queued = true;
        finished_.push_back(key);
    }
    trim();
}

template <typename Change>
void Siblings::change(LiveGroup& group, Change change) {
    const bool was_behind = group.is_behind();
    num_tokens_ -= group.num_tokens();
    change();
    num_tokens_ += group.num_tokens();
    if (group.is_behind() && !was_behind) behind_.push_back(&group);
    trim();
}

int Siblings::enter(LiveGroup& group, Span<Token> answer, size_t max_tokens) {
    int text = -1;
    change(group, [&] { text = group.enter(answer, max_tokens); });
    return text;
}

void Siblings::append(LiveGroup& group, int text, Span<Token> added) {
    change(group, [&] { group.append(text, added); });
}

void Siblings::catch_up() {
    size_t left = kMaxCaughtUp;
    while (!behind_.empty()) {
        left -= behind_.front()->catch_up(left);
        if (behind_.front()->is_behind()) return;
        behind_.pop_front();
    }
}

void Siblings::remove(PromptKey key, Group& group) {
    num_tokens_ -= kGroupTokens + group.texts->num_tokens();
    behind_.erase(std::remove(behind_.begin(), behind_.end(), group.texts.get()), behind_.end());
    group.texts.reset();
    lengths_.remove(HistoryIndex::length_of(key));
}

void Siblings::trim() {
    while (num_tokens_ > max_tokens_ && !finished_.empty()) {
        auto oldest = groups_.find(finished_.front());
        finished_.pop_front();
        oldest->second.is_queued = false;
        if (oldest->second.num_open > 0) continue;
        remove(oldest->first, oldest->second);
        groups_.erase(oldest);
    }
    while (num_tokens_ > max_tokens_) {
        LiveGroup* largest = nullptr;
        for (auto& [key, group] : groups_) {
            if (!largest || group.texts->num_tokens() > largest->num_tokens()) largest = group.texts.get();
        }
        if (!largest || largest->num_tokens() == 0) return;
        num_tokens_ -= largest->num_tokens();
        largest->clear();
    }
}

const char* Siblings::check_integrity() const {
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

}  // namespace rhyme
