#include "history_index.h"

namespace rhyme {

namespace {

constexpr uint64_t kSeed = 0xCBF29CE484222325ull;

inline uint64_t extend(uint64_t state, Token token) {
    state = (state ^ static_cast<uint32_t>(token)) * 0xFF51AFD7ED558CCDull;
    return state ^ (state >> 29);
}

inline PromptKey finish(uint64_t state) {
    state *= 0xC4CEB9FE1A85EC53ull;
    return state ^ (state >> 33);
}

}  // namespace

PromptKey HistoryIndex::key_of(Span<Token> prompt) {
    uint64_t state = kSeed;
    for (Token token : prompt) state = extend(state, token);
    return finish(state);
}

void HistoryIndex::add(PromptKey prompt, Span<Token> answer, int64_t step) {
    std::shared_ptr<PromptHistory> history;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        auto& slot = histories_[prompt];
        if (!slot) slot = std::make_shared<PromptHistory>(limits_);
        history = slot;
    }
    std::lock_guard<std::mutex> lock(history->mutex());
    history->add(answer, step);
}

FoundHistory HistoryIndex::find(Span<Token> prompt) const {
    FoundHistory found;
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t state = kSeed;
    for (size_t i = 0; i < prompt.size(); ++i) {
        state = extend(state, prompt[i]);
        auto it = histories_.find(finish(state));
        if (it != histories_.end()) found = {it->second, i + 1};
    }
    return found;
}

IndexStats HistoryIndex::stats() const {
    std::lock_guard<std::mutex> lock(mutex_);
    IndexStats total;
    for (const auto& [key, history] : histories_) {
        std::lock_guard<std::mutex> history_lock(history->mutex());
        ++total.num_prompts;
        total.num_answers += history->num_answers();
        total.num_tokens += history->num_tokens();
        total.num_bytes += history->num_bytes();
    }
    return total;
}

const char* HistoryIndex::check_integrity() const {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [key, history] : histories_) {
        std::lock_guard<std::mutex> history_lock(history->mutex());
        if (const char* problem = history->check_integrity(); *problem) return problem;
    }
    return "";
}

}  // namespace rhyme
