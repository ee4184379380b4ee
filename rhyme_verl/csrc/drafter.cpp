#include "drafter.h"

#include <algorithm>
#include <array>
#include <cassert>

namespace rhyme {

namespace {

constexpr size_t kMaxCursors = 24;         // past answers followed at once
constexpr int kConfidentRun = 4;          // a cursor that matched this many tokens in a row needs no search beside it
constexpr float kDisagreedWeight = 0.25f;  // of a cursor's vote, after it was outvoted inside a draft
constexpr float kDraftNothing = 2.0f;      // a likelihood that no token has
constexpr int kRetrySteps = 128;           // after so many steps of one kind a step of the other refreshes its cost

}  // namespace

Drafter::Drafter(std::shared_ptr<const HistoryIndex> index, const DraftPolicy& policy)
    : index_(std::move(index)), policy_(policy) {}

int Drafter::open(Span<Token> prompt) {
    if (free_slots_.empty()) {
        free_slots_.push_back(static_cast<int>(requests_.size()));
        requests_.emplace_back();
    }
    const int slot = free_slots_.back();
    free_slots_.pop_back();
    Request& request = requests_[static_cast<size_t>(slot)];
    request = Request{};
    request.open = true;
    step_.decodes_only = false;  // the step that has just run prefilled this prompt
    request.seen_tokens = prompt.size();
    request.window = policy_.initial_window;
    FoundHistory found = index_->find(prompt);
    request.history = std::move(found.history);
    if (!request.history) return slot;
    std::lock_guard<std::mutex> lock(request.history->mutex());
    request.version = request.history->version();
    std::array<Position, kMaxCursors> places;
    const size_t count = request.history->starts(places.data(), places.size());
    for (size_t i = 0; i < count; ++i) request.cursors.push_back({places[i]});
    // A resumed request starts inside its answer: what it has beyond the known prompt is followed like new tokens.
    request.seen_tokens = found.prompt_tokens;
    follow(request, prompt);
    return slot;
}

void Drafter::close(int slot) {
    Request& request = requests_[static_cast<size_t>(slot)];
    assert(request.open);
    request = Request{};
    free_slots_.push_back(slot);
}

void Drafter::draft(const std::vector<Row>& rows, double now) {
    learn_cost(now);
    for (const Row& row : rows) {
        if (row.slot >= 0) propose(requests_[static_cast<size_t>(row.slot)], row.context, row.room);
    }
    if (policy_.length == DraftLength::kCostAware) spend_budget(rows);
    const Step previous = step_;
    step_ = {now, 0, false, true};
    for (const Row& row : rows) {
        if (row.slot < 0) {
            step_.decodes_only = false;
            continue;
        }
        const size_t drafted = draft_of(row.slot).size();
        step_.num_tokens += 1 + static_cast<int>(drafted);
        step_.drafted |= drafted > 0;
    }
    steps_of_a_kind_ = step_.drafted == previous.drafted ? steps_of_a_kind_ + 1 : 0;
}

void Drafter::learn_cost(double now) {
    if (step_.decodes_only && step_.num_tokens > 0) cost_.observe(step_.num_tokens, step_.drafted, now - step_.started);
}

void Drafter::propose(Request& request, Span<Token> context, int room) {
    assert(request.open);
    if (context.size() > request.seen_tokens) account(request, context.subspan(request.seen_tokens));
    request.draft.clear();
    request.draft_cells.clear();
    request.draft_likelihoods.clear();
    if (!request.history) {
        request.seen_tokens = context.size();
        return;
    }
    std::lock_guard<std::mutex> lock(request.history->mutex());
    follow(request, context);
    const int window = policy_.length == DraftLength::kFixed ? policy_.max_draft_tokens : static_cast<int>(request.window);
    vote(request, std::min({window, policy_.max_draft_tokens, room}));
}

void Drafter::spend_budget(const std::vector<Row>& rows) {
    const bool retry = steps_of_a_kind_ >= kRetrySteps;
    if (retry && !step_.drafted) return;
    DraftBudget budget;
    int num_rows = 0;
    for (const Row& row : rows) {
        if (row.slot < 0) continue;
        ++num_rows;
        for (float likelihood : requests_[static_cast<size_t>(row.slot)].draft_likelihoods) budget.add(likelihood);
    }
    const bool compare = retry || !cost_.knows_undrafted(num_rows);
    const float threshold = compare ? kDraftNothing : budget.threshold(num_rows, cost_);
    for (const Row& row : rows) {
        if (row.slot < 0) continue;
        Request& request = requests_[static_cast<size_t>(row.slot)];
        size_t kept = 0;  // likelihoods never rise along a draft
        while (kept < request.draft.size() && request.draft_likelihoods[kept] >= threshold) ++kept;
        request.draft.resize(kept);
        request.draft_cells.resize(kept);
    }
}

void Drafter::account(Request& request, Span<Token> added) {
    // A verified draft yields its accepted tokens and one token of the model's own.
    const size_t drafted = request.draft.size();
    const size_t most = std::min(drafted, added.size() - 1);
    size_t accepted = 0;
    while (accepted < most && request.draft[accepted] == added[accepted]) ++accepted;
    stats_.num_steps += 1;
    stats_.num_generated_tokens += static_cast<int64_t>(added.size());
    if (drafted == 0) return;
    stats_.num_drafts += 1;
    stats_.num_draft_tokens += static_cast<int64_t>(drafted);
    stats_.num_accepted_tokens += static_cast<int64_t>(accepted);
    for (size_t i = 0; i < accepted; ++i) acceptance_.learn(request.draft_cells[i], true);
    if (accepted < drafted) acceptance_.learn(request.draft_cells[accepted], false);
    if (accepted == drafted) {
        request.window = std::min<double>(request.window + policy_.window_increase, policy_.max_draft_tokens);
    } else if (2 * accepted < drafted) {
        request.window = std::max(1.0, request.window * policy_.window_decrease);
    }
}

void Drafter::follow(Request& request, Span<Token> context) {
    const PromptHistory& history = *request.history;
    if (request.version != history.version() || context.size() < request.seen_tokens) {
        request.cursors.clear();
        request.version = history.version();
        request.seen_tokens = context.size();
    }
    for (; request.seen_tokens < context.size(); ++request.seen_tokens) {
        const Token token = context[request.seen_tokens];
        size_t kept = 0;
        for (Cursor cursor : request.cursors) {
            if (cursor.follow(history, token)) request.cursors[kept++] = cursor;
        }
        request.cursors.resize(kept);
    }
    int best_run = 0;
    for (const Cursor& cursor : request.cursors) best_run = std::max(best_run, cursor.run);
    if (best_run < kConfidentRun) search(request, context);
}

void Drafter::search(Request& request, Span<Token> context) {
    std::array<Match, kMaxCursors> matches;
    const size_t found = request.history->find_suffix(context, matches.data(), matches.size());
    for (size_t i = 0; i < found; ++i) {
        const Match& match = matches[i];
        if (request.history->at(match.next) == kEnd) continue;
        auto same_place = [&](const Cursor& cursor) { return cursor.next == match.next; };
        auto known = std::find_if(request.cursors.begin(), request.cursors.end(), same_place);
        if (known != request.cursors.end()) continue;
        if (request.cursors.size() == kMaxCursors) {
            auto weaker = [](const Cursor& a, const Cursor& b) { return a.score < b.score; };
            known = std::min_element(request.cursors.begin(), request.cursors.end(), weaker);
            if (known->score >= static_cast<float>(match.length)) continue;
            request.cursors.erase(known);
        }
        request.cursors.push_back({match.next, static_cast<float>(match.length), match.length, 0});
    }
}

void Drafter::vote(Request& request, int limit) {
    const PromptHistory& history = *request.history;
    struct Voter {
        Position next;
        float score;
        float weight;
    };
    std::array<Voter, kMaxCursors> voters;
    size_t num_voters = 0;
    for (const Cursor& cursor : request.cursors) {
        const float weight = (1.0f + cursor.score) * (1.0f + cursor.score);
        voters[num_voters++] = {cursor.next, cursor.score, weight};
    }
    float likelihood = 1.0f;
    while (static_cast<int>(request.draft.size()) < limit) {
        float total = 0.0f;
        float best_weight = 0.0f;
        Token best = kEnd;
        for (size_t i = 0; i < num_voters; ++i) {
            const Token token = history.at(voters[i].next);
            total += voters[i].weight;
            float weight = voters[i].weight;
            for (size_t j = 0; j < i; ++j) weight += history.at(voters[j].next) == token ? voters[j].weight : 0.0f;
            if (weight > best_weight) {
                best_weight = weight;
                best = token;
            }
        }
        if (best == kEnd) return;
        float best_score = 0.0f;
        for (size_t i = 0; i < num_voters; ++i) {
            if (history.at(voters[i].next) == best) best_score = std::max(best_score, voters[i].score);
        }
        const AcceptanceTable::Cell cell = AcceptanceTable::cell(best_score, best_weight / total);
        likelihood *= acceptance_.probability(cell);
        if (likelihood < policy_.min_acceptance) return;
        request.draft.push_back(best);
        request.draft_cells.push_back(cell);
        request.draft_likelihoods.push_back(likelihood);
        size_t kept = 0;
        for (size_t i = 0; i < num_voters; ++i) {
            Voter voter = voters[i];
            if (history.at(voter.next) == kEnd) continue;
            if (history.at(voter.next) != best) voter.weight *= kDisagreedWeight;
            ++voter.next;
            voters[kept++] = voter;
        }
        num_voters = kept;
    }
}

}  // namespace rhyme
