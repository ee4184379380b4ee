#include "prompt_history.h"

#include <algorithm>
#include <cassert>

namespace rhyme {

namespace {

constexpr int kMaxMatchTokens = 64;     // longer agreement says nothing more about the next token
constexpr int kMaxCandidates = 64;      // places looked at in one search
constexpr size_t kInitialBuckets = 64;

}  // namespace

PromptHistory::PromptHistory(const HistoryLimits& limits) : limits_(limits), heads_(kInitialBuckets, kNowhere) {}

void PromptHistory::add(Span<Token> answer, int64_t step) {
    if (answer.empty()) return;
    answer = answer.first(std::min(answer.size(), static_cast<size_t>(limits_.max_tokens)));
    if (!answers_.empty()) step = std::max(step, answers_.back().step);  // a late answer counts as new
    if (evict(step, answer.size())) {
        ++version_;
        heads_.assign(heads_.size(), kNowhere);
        prev_.clear();
        index_from(0);
    }
    append(answer, step);
}

void PromptHistory::append(Span<Token> answer, int64_t step) {
    const size_t begin = tokens_.size();
    answers_.push_back({static_cast<Position>(begin), step});
    tokens_.insert(tokens_.end(), answer.begin(), answer.end());
    tokens_.push_back(kEnd);
    index_from(begin);
}

bool PromptHistory::evict(int64_t newest_step, size_t incoming) {
    size_t drop = 0;
    int64_t steps_seen = 0;
    int64_t last_step = INT64_MIN;
    if (answers_.empty() || answers_.back().step != newest_step) ++steps_seen;  // the incoming answer opens a step
    size_t kept_tokens = incoming;
    for (size_t i = answers_.size(); i-- > 0;) {
        const Position end = i + 1 < answers_.size() ? answers_[i + 1].begin : static_cast<Position>(tokens_.size());
        kept_tokens += end - answers_[i].begin - 1;
        if (answers_[i].step != last_step) ++steps_seen;
        last_step = answers_[i].step;
        if (steps_seen > limits_.window_epochs || kept_tokens > static_cast<size_t>(limits_.max_tokens)) {
            drop = i + 1;
            break;
        }
    }
    if (drop == 0) return false;
    const Position cut = drop < answers_.size() ? answers_[drop].begin : static_cast<Position>(tokens_.size());
    tokens_.erase(tokens_.begin(), tokens_.begin() + cut);
    answers_.erase(answers_.begin(), answers_.begin() + static_cast<std::ptrdiff_t>(drop));
    for (Answer& answer : answers_) answer.begin -= cut;
    return true;
}

void PromptHistory::index_from(size_t begin) {
    prev_.resize(tokens_.size(), kNowhere);
    if (tokens_.size() > heads_.size()) {
        grow_table();
        return;
    }
    const size_t gram = static_cast<size_t>(limits_.gram_tokens);
    size_t run = 0;  // tokens since the last answer's end
    for (size_t i = begin; i < tokens_.size(); ++i) {
        if (run >= gram) {  // place i follows the gram before it; it may be an answer's end
            Position& head = heads_[bucket_of(&tokens_[i - gram])];
            prev_[i] = head;
            head = static_cast<Position>(i);
        }
        run = tokens_[i] == kEnd ? 0 : run + 1;
    }
}

void PromptHistory::grow_table() {
    size_t buckets = heads_.size();
    while (buckets < tokens_.size()) buckets *= 2;
    heads_.assign(buckets, kNowhere);
    std::fill(prev_.begin(), prev_.end(), kNowhere);
    index_from(0);
}

uint64_t PromptHistory::bucket_of(const Token* gram) const {
    uint64_t hash = 0x9E3779B97F4A7C15ull;
    for (int i = 0; i < limits_.gram_tokens; ++i) {
        hash = (hash ^ static_cast<uint32_t>(gram[i])) * 0xD6E8FEB86659FD93ull;
        hash ^= hash >> 32;
    }
    return hash & (heads_.size() - 1);
}

size_t PromptHistory::find_suffix(Span<Token> context, Match* matches, size_t max_matches) const {
    const size_t gram = static_cast<size_t>(limits_.gram_tokens);
    if (context.size() < gram || tokens_.empty()) return 0;
    const Token* tail = context.end();
    size_t found = 0;
    Position place = heads_[bucket_of(tail - gram)];
    for (int looked = 0; place != kNowhere && looked < kMaxCandidates && found < max_matches; ++looked) {
        const int limit = static_cast<int>(std::min<size_t>({context.size(), place, kMaxMatchTokens}));
        int length = 0;  // kEnd never equals a context token, so a match cannot leave its answer
        while (length < limit && tokens_[place - 1 - length] == *(tail - 1 - length)) ++length;
        if (length >= static_cast<int>(gram)) matches[found++] = {place, length};
        place = prev_[place];
    }
    return found;
}

size_t PromptHistory::starts(Position* places, size_t max_places) const {
    const size_t count = std::min(max_places, answers_.size());
    for (size_t i = 0; i < count; ++i) places[i] = answers_[answers_.size() - 1 - i].begin;
    return count;
}

int64_t PromptHistory::num_bytes() const {
    return static_cast<int64_t>(sizeof(*this) + tokens_.capacity() * sizeof(Token) +
                                prev_.capacity() * sizeof(Position) + heads_.capacity() * sizeof(Position) +
                                answers_.size() * sizeof(Answer));
}

const char* PromptHistory::check_integrity() const {
    if (tokens_.size() != prev_.size()) return "chains and tokens differ in length";
    if (heads_.size() < tokens_.size() || (heads_.size() & (heads_.size() - 1))) return "table size is wrong";
    size_t ends = std::count(tokens_.begin(), tokens_.end(), kEnd);
    if (ends != answers_.size()) return "answers and their ends differ in number";
    for (size_t i = 0; i < answers_.size(); ++i) {
        if (answers_[i].begin > 0 && tokens_[answers_[i].begin - 1] != kEnd) return "an answer begins inside another";
        if (i > 0 && answers_[i].step < answers_[i - 1].step) return "steps decrease";
    }
    for (size_t i = 0; i < prev_.size(); ++i) {
        if (prev_[i] != kNowhere && prev_[i] >= i) return "a chain goes forwards";
    }
    return "";
}

}  // namespace rhyme
