// The finished answers of one prompt, with an index of where runs of tokens occur in them. Immutable once built: merge()
// makes a new history from the old one and new answers, so readers need no lock and never wait for ingest. Pointers into a
// history are valid as long as a shared_ptr holds it.
//
// Answers are stored one after another in a single token array, oldest first, each closed by kEnd. A position is an index
// into this array, so the next token of an answer is one load. Every gram is chained to the previous one with the same
// hash, so a search takes one hash and a short walk, newest first. The followers of short contexts are counted as well.
//
// Invariants: tokens_.size() == prev_.size(); every answer is followed by exactly one kEnd; chains go strictly
// backwards; steps of answers_ never decrease.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_set>
#include <vector>

#include "context_counts.h"
#include "paged_vector.h"
#include "tokens.h"

namespace rhyme {

struct HistoryLimits {
    int window_epochs;              // number of rollout steps per prompt whose answers are kept
    int64_t max_tokens_per_prompt;
    int64_t max_bytes;              // over all prompts
};

// Finished answers of one prompt. Every span but `tokens` has one value per answer. The caller owns the values.
struct AnswerBatch {
    Span<Token> tokens;  // all answers, one after another
    Span<int32_t> lengths;
    Span<int64_t> steps;  // place of its rollout among those of the prompt, of each answer
    Span<uint64_t> ids;   // an answer replaces an earlier one with the same id
};

class PromptHistory {
  public:
    // Copies the answers of `old` (may be null) and `batch` within the limits. Ignores empty answers. Token ids are >= 0.
    static std::shared_ptr<const PromptHistory> merge(const PromptHistory* old, const AnswerBatch& batch,
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
            if (kept > 0) sources.push_back({batch.tokens.subspan(offset).first(kept), batch.ids[i], batch.steps[i]});
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

    // Calls visit(match) as Places::find does. A match may lie at an answer's end, where at() is kEnd.
    template <typename Visit>
    void find_suffix(Span<Token> context, size_t max_matches, Visit visit) const {
        // kEnd never equals a context token, so a match cannot leave its answer.
        const auto spot_of = [&](Position place) -> NewestPlaces::Spot { return {address(place), place, prev_[place]}; };
        newest_.find(context, max_matches, spot_of, visit);
    }

    // Calls visit(position) for the first tokens of the newest answers, newest first.
    template <typename Visit>
    void for_each_start(size_t most, Visit visit) const {
        for (size_t i = 0; i < std::min(most, answers_.size()); ++i) visit(answers_[answers_.size() - 1 - i].begin);
    }

    Token at(Position position) const { return tokens_[position]; }
    const Token* address(Position position) const { return &tokens_[position]; }

    const ContextCounts& counts() const { return counts_; }

    int64_t num_tokens() const { return static_cast<int64_t>(tokens_.size() - answers_.size()); }
    int64_t num_answers() const { return static_cast<int64_t>(answers_.size()); }

    int64_t num_bytes() const {
        const size_t texts = tokens_.capacity() * sizeof(Token) + prev_.capacity() * sizeof(Position);
        return static_cast<int64_t>(sizeof(*this) + texts + answers_.capacity() * sizeof(Answer)) +
               newest_.num_bytes() + counts_.num_bytes();
    }

    const char* check_integrity() const {
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

  private:
    struct Source {  // an answer that merge() copies
        Span<Token> tokens;
        uint64_t id;
        int64_t step;
    };

    struct Answer {
        uint64_t id;
        int64_t step;
        Position begin;
        uint32_t size;
    };

    void index_tokens() {
        prev_.assign(tokens_.size(), kNowhere);
        newest_ = NewestPlaces(std::max<size_t>(1, tokens_.size() / 2));
        counts_ = ContextCounts(tokens_.size());
        for (const Answer& answer : answers_) {
            for (size_t i = answer.begin + kGramTokens; i <= answer.begin + answer.size; ++i) {  // just past its gram
                prev_[i] = newest_.replace(&tokens_[i], static_cast<Position>(i));
            }
            count_contexts({address(answer.begin), answer.size}, 0, kMaxLocalOrder, counts_);
        }
    }

    PagedVector<Token> tokens_;
    PagedVector<Position> prev_;  // prev_[i]: an earlier position after a gram with the same hash, or kNowhere
    NewestPlaces newest_;
    std::vector<Answer> answers_;
    ContextCounts counts_;
};

}  // namespace rhyme
