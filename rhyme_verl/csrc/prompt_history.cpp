#include "prompt_history.h"

#include <algorithm>
#include <unordered_set>

namespace rhyme {

namespace {

constexpr int kMaxCandidates = 32;  // positions visited per search

struct Source {
    Span<Token> tokens;
    uint64_t id;
    int64_t step;
};

}  // namespace

std::shared_ptr<const PromptHistory> PromptHistory::merge(const PromptHistory* old, const AnswerBatch& batch,
                                                          const HistoryLimits& limits) {
    std::vector<Source> sources;
    const std::unordered_set<uint64_t> incoming(batch.ids.begin(), batch.ids.end());
    if (old) {
        for (const Answer& answer : old->answers_) {
            if (incoming.count(answer.id)) continue;
            sources.push_back({{old->address(answer.begin), answer.size}, answer.id, answer.step});
        }
    }
    size_t offset = 0;
    for (size_t i = 0; i < batch.lengths.size(); ++i) {
        const size_t length = static_cast<size_t>(batch.lengths[i]);
        const size_t kept = std::min(length, static_cast<size_t>(limits.max_tokens_per_prompt));
        if (kept > 0) {
            sources.push_back({batch.tokens.subspan(offset).first(kept), batch.ids[i], batch.steps[i]});
        }
        offset += length;
    }
    std::stable_sort(sources.begin(), sources.end(), [](const Source& a, const Source& b) { return a.step < b.step; });

    size_t first = sources.size(), num_tokens = 0;
    int num_steps = 0;
    while (first > 0) {
        const Source& source = sources[first - 1];
        num_steps += first == sources.size() || source.step != sources[first].step;
        const size_t total = num_tokens + source.tokens.size();
        if (num_steps > limits.window_epochs || total > static_cast<size_t>(limits.max_tokens_per_prompt)) break;
        num_tokens = total;
        --first;
    }

    auto history = std::make_shared<PromptHistory>();
    history->tokens_.reserve(num_tokens + sources.size() - first);
    history->answers_.reserve(sources.size() - first);
    for (size_t i = first; i < sources.size(); ++i) {
        const Source& source = sources[i];
        const Position begin = static_cast<Position>(history->tokens_.size());
        history->answers_.push_back({source.id, source.step, begin, static_cast<uint32_t>(source.tokens.size())});
        history->tokens_.insert(history->tokens_.end(), source.tokens.begin(), source.tokens.end());
        history->tokens_.push_back(kEnd);
    }
    history->index_tokens();
    return history;
}

void PromptHistory::index_tokens() {
    prev_.assign(tokens_.size(), kNowhere);
    newest_ = NewestPlaces(std::max<size_t>(1, tokens_.size() / 2));
    counts_ = ContextCounts(tokens_.size());
    for (const Answer& answer : answers_) {
        for (size_t i = answer.begin + kGramTokens; i <= answer.begin + answer.size; ++i) {  // position i follows its gram
            prev_[i] = newest_.replace(&tokens_[i], static_cast<Position>(i));
        }
        count_contexts({address(answer.begin), answer.size}, 0, kMaxLocalOrder, counts_);
    }
}

size_t PromptHistory::find_suffix(Span<Token> context, Match* matches, size_t max_matches) const {
    if (context.size() < kGramTokens) return 0;
    const Token* tail = context.end();
    size_t found = 0;
    Position place = newest_.find(tail);
    for (int looked = 0; place != kNowhere && looked < kMaxCandidates && found < max_matches; ++looked) {
        // kEnd never equals a context token, so a match cannot leave its answer.
        const int limit = static_cast<int>(std::min<size_t>({context.size(), place, kMaxMatchTokens}));
        const int length = common_suffix(&tokens_[place], tail, limit);
        if (static_cast<size_t>(length) >= kGramTokens) matches[found++] = {place, length};
        place = prev_[place];
    }
    return found;
}

size_t PromptHistory::starts(Position* places, size_t max_places) const {
    const size_t count = std::min(max_places, answers_.size());
    for (size_t i = 0; i < count; ++i) places[i] = answers_[answers_.size() - 1 - i].begin;
    return count;
}

double PromptHistory::expected_rest(size_t length) const {
    double rest = 0.0;
    int longer = 0;
    for (const Answer& answer : answers_) {
        if (answer.size <= length) continue;
        rest += static_cast<double>(answer.size - length);
        ++longer;
    }
    return longer ? rest / longer : 0.5 * static_cast<double>(length);
}

int64_t PromptHistory::num_bytes() const {
    return static_cast<int64_t>(sizeof(*this) + tokens_.capacity() * sizeof(Token) + prev_.capacity() * sizeof(Position) +
                                answers_.capacity() * sizeof(Answer)) +
           newest_.num_bytes() + counts_.num_bytes();
}

const char* PromptHistory::check_integrity() const {
    if (tokens_.size() != prev_.size()) return "chains and tokens differ in length";
    if (static_cast<size_t>(std::count(tokens_.begin(), tokens_.end(), kEnd)) != answers_.size()) {
        return "answers and their ends differ in number";
    }
    for (size_t i = 0; i < answers_.size(); ++i) {
        if (tokens_[answers_[i].begin + answers_[i].size] != kEnd) return "an answer is not closed by kEnd";
        if (answers_[i].begin > 0 && tokens_[answers_[i].begin - 1] != kEnd) return "an answer begins inside another";
        if (i > 0 && answers_[i].step < answers_[i - 1].step) return "the steps of the answers decrease";
    }
    for (size_t i = 0; i < prev_.size(); ++i) {
        if (prev_[i] != kNowhere && prev_[i] >= i) return "a chain leads forwards";
    }
    return "";
}

}  // namespace rhyme
