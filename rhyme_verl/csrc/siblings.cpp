#include "siblings.h"

namespace rhyme {

namespace {

constexpr int kMaxGroupTexts = 64;  // a finished group with this many texts is replaced when it is joined

}  // namespace

LiveGroup* Siblings::join(PromptKey key, Span<Token> prompt, uint64_t version) {
    Group& group = groups_[key];
    const bool is_over = group.num_open == 0 && group.texts;
    if (is_over && (group.version != version || group.texts->num_texts() >= kMaxGroupTexts)) remove(key, group);
    if (!group.texts) {
        group.texts = std::make_unique<LiveGroup>(prompt);
        group.version = version;
        lengths_.add(HistoryIndex::length_of(key));
        num_tokens_ += group.texts->num_tokens();
    }
    ++group.num_open;
    return group.texts.get();
}

void Siblings::leave(PromptKey key) {
    Group& group = groups_[key];
    if (--group.num_open == 0 && !group.is_queued) {
        group.is_queued = true;
        finished_.push_back(key);
    }
    trim();
}

void Siblings::append(LiveGroup& group, int text, Span<Token> added) {
    num_tokens_ -= group.num_tokens();
    group.append(text, added);
    num_tokens_ += group.num_tokens();
}

void Siblings::remove(PromptKey key, Group& group) {
    num_tokens_ -= group.texts->num_tokens();
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
}

const char* Siblings::check_integrity() const {
    int64_t num_tokens = 0;
    size_t num_queued = 0;
    for (const auto& [key, group] : groups_) {
        if (!group.texts) return "a group has no texts";
        if (group.num_open == 0 && !group.is_queued) return "a group that has ended is not queued";
        if (const char* problem = group.texts->check_integrity(); *problem) return problem;
        num_tokens += group.texts->num_tokens();
        num_queued += group.is_queued;
    }
    if (num_tokens != num_tokens_) return "the number of live tokens is wrong";
    return num_queued == finished_.size() ? "" : "the queue of finished groups is wrong";
}

}  // namespace rhyme
