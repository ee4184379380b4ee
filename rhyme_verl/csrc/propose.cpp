// The drafts of a step: what they hold, and which of their tokens pay.
#include <algorithm>

#include "drafter.h"

namespace rhyme {

void Drafter::propose(const std::vector<Row>& rows, StepBound bound) {
    const int num_rows = static_cast<int>(rows.size());
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

    // Tokens that are worth far less than those that were verified last would be dropped, so they are not predicted.
    const double floor =
        std::max(policy_.min_acceptance, static_cast<double>(least_worth_ / std::max(1.0f, request.weight)));
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

// Returns how many more tokens the answer is expected to get; negative if nothing is known about its prompt.
double Drafter::expected_rest(const Request& request, size_t context_tokens) const {
    if (!request.past && request.expected_tokens <= 0) return -1.0;
    const size_t length = context_tokens - std::min(context_tokens, request.prompt_tokens);
    const auto most = static_cast<double>(request.max_tokens - static_cast<int64_t>(context_tokens));
    const auto so_far = static_cast<double>(length);
    const double rest = request.past ? request.past->expected_rest(length)
                                     : std::max(request.expected_tokens - so_far, 0.5 * so_far);
    return std::clamp(rest, 0.0, std::max(0.0, most));
}

// Sets the requests' weights, whose mean is about 1. A request without an expectation gets weight 1.
void Drafter::weigh(const std::vector<Row>& rows) {
    double sum = 0.0;
    int num_known = 0;
    for (const Row& row : rows) {
        Request& request = request_of(row.slot);
        request.expected_rest = expected_rest(request, row.context.size());
        if (request.expected_rest < 0.0) continue;
        sum += request.expected_rest;
        ++num_known;
    }
    for (const Row& row : rows) {
        Request& request = request_of(row.slot);
        const auto relative = static_cast<float>(request.expected_rest / (sum / num_known));
        const bool is_known = request.expected_rest >= 0.0 && sum > 0.0;
        request.weight = is_known ? std::clamp(relative, DraftBudget::kLeastWeight, DraftBudget::kMaxWeight) : 1.0f;
    }
}

void Drafter::spend_budget(const std::vector<Row>& rows, bool pads_rows, int max_draft_tokens) {
    const int num_rows = static_cast<int>(rows.size());
    // While new requests come, one that ends makes room for another, so every token counts the same.
    const bool is_last_wave = static_cast<double>(num_calls_ - last_open_call_) > 1.0 + kLastWave * calls_per_new_;
    if (policy_.stragglers_first && is_last_wave) weigh(rows);
    DraftBudget budget;
    for (const Row& row : rows) {
        Request& request = request_of(row.slot);
        if (!is_last_wave) request.weight = 1.0f;
        const Draft& draft = request.draft();
        for (int i = 0; i < draft.size; ++i) {
            budget.add(draft.likelihoods[static_cast<size_t>(i)], request.weight, i + 1);
        }
    }
    DraftBudget::Choice choice;
    if (!wants_undrafted(num_rows)) {
        const StepCost& cost = policy_.cost_aware ? account_.cost() : unknown_cost_;
        choice = budget.choose(num_rows, cost, pads_rows, account_.is_retry(), max_draft_tokens);
        const bool has_floor = policy_.cost_aware && num_rows >= kFloorRows;
        least_worth_ = has_floor ? std::min(kMostFloor, kFloorShare * choice.threshold()) : 0.0f;
    }
    for (const Row& row : rows) {
        Request& request = request_of(row.slot);
        Draft& draft = request.draft();
        int kept = 0;  // likelihoods never increase along a draft
        while (kept < draft.size && choice.takes(request.weight * draft.likelihoods[static_cast<size_t>(kept)])) ++kept;
        draft.size = kept;
    }
}

}  // namespace rhyme
