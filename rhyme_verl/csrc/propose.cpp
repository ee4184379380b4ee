// The drafts of a step: what they hold, and which of their tokens pay.
#include <algorithm>

#include "drafter.h"

namespace rhyme {

void Drafter::propose(const std::vector<Row>& rows, StepBound bound) {
    const int num_rows = std::max(static_cast<int>(rows.size()), bound.num_rows);
    const int allowed = bound.max_tokens - num_rows;  // draft tokens in the whole batch
    int longest = std::min(allowed, kMaxDraftTokens);
    if (bound.pads_rows()) longest = std::min(longest, bound.max_sampled / std::max(1, num_rows) - 1);
    threads_.run(rows.size(), [&](size_t i) {
        propose(request_of(rows[i].slot), rows[i].context, std::min(rows[i].room, longest));
    });
    spend_budget(rows, bound.pads_rows(), allowed);
}

Walks Drafter::best_walks(Request& request) const {
    const Texts texts = request.texts();
    Walks walks;
    walks.count = std::min(request.cursors.size(), Walks::kMost);
    const auto last = request.cursors.begin() + static_cast<std::ptrdiff_t>(walks.count);  // cursors are in any order
    std::ranges::nth_element(request.cursors, last, std::ranges::greater(), &Cursor::score);
    for (size_t i = 0; i < walks.count; ++i) walks.of[i] = request.cursors[i].walk(texts);
    return walks;
}

void Drafter::predict(Request& request, Span<Token> context, int limit) {
    const Texts texts = request.texts();
    Walks walks = best_walks(request);
    // The end of the context, followed by the draft: short contexts are taken from it.
    std::array<Token, LogBilinear::kContext + kMaxDraftTokens + 1> text;
    const size_t known = std::min(context.size(), LogBilinear::kContext);
    std::copy(context.end() - known, context.end(), text.begin());

    // Tokens that are far less likely than those that were verified last would be dropped, so they are not predicted.
    const double floor = std::max(policy_.min_acceptance, static_cast<double>(least_likelihood_));
    Draft& draft = request.draft();
    float likelihood = 1.0f;
    for (size_t i = 0; i <= static_cast<size_t>(limit); ++i) {
        const size_t length = known + i;
        const ContextHashes hashes(text.data() + length, length);
        if (policy_.common) common_.prefetch(hashes);
        Evidence evidence;
        ask_texts(walks, evidence);
        ask_prompt(texts, hashes, evidence);
        if (policy_.common) ask_all_prompts(common_, hashes, evidence);
        if (evidence.num_candidates == 0) return;
        Prediction& prediction = draft.predictions[i];
        mixer_.mix(evidence, LogBilinear::context_of(text.data() + length, length), prediction);
        const Token token = prediction.token();
        if (token >= policy_.vocab_size) return;
        likelihood *= prediction.probability;
        draft.tokens[i] = text[length] = token;
        draft.likelihoods[i] = likelihood;
        draft.num_predicted = static_cast<int>(i) + 1;
        if (static_cast<int>(i) == limit || likelihood < floor) return;
        draft.size = static_cast<int>(i) + 1;
        walks.advance(token, policy_.rejoin);
    }
}

void Drafter::spend_budget(const std::vector<Row>& rows, bool pads_rows, int max_draft_tokens) {
    const int num_rows = static_cast<int>(rows.size());
    DraftBudget budget;
    for (const Row& row : rows) {
        const Draft& draft = request_of(row.slot).draft();
        for (int i = 0; i < draft.size; ++i) budget.add(draft.likelihoods[static_cast<size_t>(i)], i + 1);
    }
    DraftBudget::Choice choice;
    if (!wants_undrafted(num_rows)) {
        const StepCost& cost = policy_.cost_aware ? account_.cost() : unknown_cost_;
        choice = budget.choose(num_rows, cost, pads_rows, account_.is_retry(), max_draft_tokens);
        const bool has_floor = policy_.cost_aware && num_rows >= kFloorRows;
        least_likelihood_ = has_floor ? std::min(kMostFloor, kFloorShare * choice.threshold()) : 0.0f;
    }
    for (const Row& row : rows) {
        Draft& draft = request_of(row.slot).draft();
        int kept = 0;  // likelihoods never increase along a draft
        while (kept < draft.size && choice.takes(draft.likelihoods[static_cast<size_t>(kept)])) ++kept;
        draft.size = kept;
    }
}

}  // namespace rhyme
