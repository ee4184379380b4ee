#include "drafter.h"

#include <algorithm>
#include <cassert>

namespace rhyme {

namespace {

constexpr float kConfidentScore = 6.0f;   // of a cursor that needs no search beside it
constexpr float kDraftNothing = 2.0f;     // a likelihood that no token has
constexpr int kRetrySteps = 128;          // after so many steps of one kind a step of the other refreshes its cost
constexpr int kMaxGroupTexts = 64;        // a finished group with more texts is begun anew
constexpr float kPhraseBelow = 0.9f;      // common phrases are asked when the texts are less sure than this

}  // namespace

Drafter::Drafter(std::shared_ptr<const HistoryIndex> index, const DraftPolicy& policy)
    : index_(std::move(index)), policy_(policy) {}

int Drafter::open(Span<Token> prompt, int max_new_tokens) {
    if (free_slots_.empty()) {
        free_slots_.push_back(static_cast<int>(requests_.size()));
        requests_.emplace_back();
    }
    const int slot = free_slots_.back();
    free_slots_.pop_back();
    Request& request = request_of(slot);
    request = Request{};
    request.open = true;
    request.window = policy_.initial_window;
    request.max_tokens = static_cast<int64_t>(prompt.size()) + max_new_tokens;
    step_.decodes_only = false;  // the step that has just run prefilled this prompt
    const FoundEntry found = index_->find(prompt);
    request.num_created = index_->num_created();
    request.entry = found.entry;
    // The request's first prompt: the known one, or else one that siblings started from, or else all it starts from.
    PromptKey whole = 0;
    HistoryIndex::for_each_prefix(prompt, [&](PromptKey key, size_t length) {
        whole = key;
        const bool is_first = found.entry ? length == found.prompt_tokens
                                          : sibling_lengths_.has(HistoryIndex::length_of(key)) && siblings_.count(key) > 0;
        if (!is_first) return;
        request.key = key;
        request.prompt_tokens = length;
    });
    if (request.prompt_tokens == 0) {
        request.key = whole;
        request.prompt_tokens = prompt.size();
    }
    if (request.entry) {
        request.version = request.entry->version();
        request.past = request.entry->history();
    }
    if (policy_.sibling_weight > 0.0) join_siblings(request, prompt.first(request.prompt_tokens));
    start_at_beginnings(request);
    request.seen_tokens = request.prompt_tokens;
    return slot;
}

void Drafter::close(int slot) {
    Request& request = request_of(slot);
    assert(request.open);
    if (request.live) {
        Siblings& siblings = siblings_[request.key];
        if (--siblings.num_open == 0 && !siblings.queued) {
            siblings.queued = true;
            finished_groups_.push_back(request.key);
        }
    }
    request = Request{};
    free_slots_.push_back(slot);
    trim_siblings();
}

void Drafter::join_siblings(Request& request, Span<Token> prompt) {
    Siblings& siblings = siblings_[request.key];
    const bool outdated = siblings.num_open == 0 && siblings.group &&
                          (siblings.version != request.version || siblings.group->num_texts() >= kMaxGroupTexts);
    if (outdated) {
        num_live_tokens_ -= siblings.group->num_tokens();
        siblings.group.reset();
        sibling_lengths_.remove(HistoryIndex::length_of(request.key));
    }
    if (!siblings.group) {
        siblings.group = std::make_unique<LiveGroup>(policy_.gram_tokens, prompt);
        siblings.version = request.version;
        sibling_lengths_.add(HistoryIndex::length_of(request.key));
        num_live_tokens_ += siblings.group->num_tokens();
    }
    ++siblings.num_open;
    request.live = siblings.group.get();
    request.live_text = request.live->open();
}

void Drafter::trim_siblings() {
    while (num_live_tokens_ > policy_.max_live_tokens && !finished_groups_.empty()) {
        auto oldest = siblings_.find(finished_groups_.front());
        finished_groups_.pop_front();
        oldest->second.queued = false;
        if (oldest->second.num_open > 0) continue;
        num_live_tokens_ -= oldest->second.group->num_tokens();
        sibling_lengths_.remove(HistoryIndex::length_of(oldest->first));
        siblings_.erase(oldest);
    }
}

void Drafter::draft(const std::vector<Row>& rows, StepBound bound, double now) {
    learn_cost(now);
    // Siblings see each other's newest tokens, so all rows are taken in before any is drafted for.
    const int64_t accepted_before = stats_.num_accepted_tokens;
    int num_verified = 0;
    for (const Row& row : rows) {
        if (row.slot < 0) continue;
        Request& request = request_of(row.slot);
        assert(request.open);
        if (row.context.size() <= request.seen_tokens) continue;
        num_verified += !request.is_new;
        take_in(request, row.context);
    }
    note_saving(num_verified, stats_.num_accepted_tokens - accepted_before, now - step_.started);
    const int num_rows = static_cast<int>(rows.size());
    const int longest = bound.pads_rows ? bound.max_tokens / std::max(1, num_rows) - 1 : Drafter::kMaxDraftTokens;
    for (size_t i = 0; i < rows.size(); ++i) {
        if (i + 1 < rows.size() && rows[i + 1].slot >= 0) prefetch(request_of(rows[i + 1].slot));
        if (rows[i].slot >= 0) propose(request_of(rows[i].slot), rows[i].context, std::min(rows[i].room, longest));
    }
    cut_longest(rows, bound.max_tokens - num_rows);
    if (policy_.length == DraftLength::kCostAware) spend_budget(rows, bound.pads_rows);
    const Step previous = step_;
    step_ = {now, {}, false, true};
    int longest_drafted = 0;
    for (const Row& row : rows) {
        if (row.slot < 0) {
            step_.decodes_only = false;
            continue;
        }
        const int drafted = static_cast<int>(draft_of(row.slot).size());
        step_.size.tokens += 1 + drafted;
        longest_drafted = std::max(longest_drafted, drafted);
    }
    step_.drafted = longest_drafted > 0;
    step_.size.sampled = bound.pads_rows ? num_rows * (1 + longest_drafted) : step_.size.tokens;
    steps_of_a_kind_ = step_.drafted == previous.drafted ? steps_of_a_kind_ + 1 : 0;
}

// Shorten the longest drafts until no more than `max_draft_tokens` are left in the batch.
void Drafter::cut_longest(const std::vector<Row>& rows, int max_draft_tokens) {
    std::array<int, kMaxDraftTokens + 1> num_reaching{};  // drafts of at least so many tokens
    for (const Row& row : rows) {
        if (row.slot < 0) continue;
        ++num_reaching[static_cast<size_t>(request_of(row.slot).draft.size)];
    }
    for (size_t length = kMaxDraftTokens; length-- > 0;) num_reaching[length] += num_reaching[length + 1];
    int longest = 0, total = 0;
    while (longest < kMaxDraftTokens && total + num_reaching[static_cast<size_t>(longest) + 1] <= max_draft_tokens) {
        total += num_reaching[static_cast<size_t>(++longest)];
    }
    int left = std::max(0, max_draft_tokens - total);  // not enough for one more token in every row
    for (const Row& row : rows) {
        if (row.slot < 0) continue;
        int& size = request_of(row.slot).draft.size;
        if (size <= longest) continue;
        size = longest + (left > 0);
        left -= left > 0;
    }
}

void Drafter::learn_cost(double now) {
    if (step_.decodes_only && step_.size.tokens > 0) cost_.observe(step_.size, step_.drafted, now - step_.started);
}

void Drafter::note_saving(int num_rows, int64_t accepted, double elapsed) {
    if (!step_.drafted || num_rows == 0) return;
    // What the step was expected to take or what it took, whichever is less: neither a stall now nor one that the table
    // still remembers is to be held for a cost. Nor can a step cost more without its drafts than with them.
    const double drafted = std::min(cost_.seconds(step_.size, true), elapsed);
    const double plain = std::min(cost_.seconds(StepSize::undrafted(num_rows), false), drafted);
    if (plain <= 0.0) return;  // nothing to compare with
    stats_.saved_seconds += plain * static_cast<double>(num_rows + accepted) / num_rows - drafted;
}

void Drafter::take_in(Request& request, Span<Token> context) {
    const Span<Token> added = context.subspan(request.seen_tokens);
    account(request, request.is_new ? added.subspan(added.size() - 1) : added);
    request.is_new = false;
    if (request.live) {
        num_live_tokens_ -= request.live->num_tokens();
        request.live->append(request.live_text, added);
        num_live_tokens_ += request.live->num_tokens();
    }
    if (!policy_.phrases) return;
    for (size_t i = std::max<size_t>(request.seen_tokens, PhraseTable::kMaxOrder); i < context.size(); ++i) {
        phrases_.learn(&context[i], context[i]);
    }
}

void Drafter::account(Request& request, Span<Token> added) {
    // A verified draft yields its accepted tokens and one token of the model's own.
    const Draft& draft = request.draft;
    const int most = std::min<int>(draft.size, static_cast<int>(added.size()) - 1);
    int accepted = 0;
    while (accepted < most && draft.tokens[static_cast<size_t>(accepted)] == added[static_cast<size_t>(accepted)])
        ++accepted;
    // The first token that was predicted but not accepted or not drafted is known to be right or wrong, too.
    for (int i = 0; i < accepted; ++i) acceptance_.learn(draft.cells[static_cast<size_t>(i)], true);
    if (accepted < draft.num_predicted && static_cast<size_t>(accepted) < added.size()) {
        const size_t next = static_cast<size_t>(accepted);
        acceptance_.learn(draft.cells[next], draft.tokens[next] == added[next]);
    }
    stats_.num_steps += 1;
    stats_.num_generated_tokens += static_cast<int64_t>(added.size());
    if (draft.size == 0) return;
    stats_.num_drafts += 1;
    stats_.num_draft_tokens += draft.size;
    stats_.num_accepted_tokens += accepted;
    const size_t range = DraftStats::range_of(request.seen_tokens - request.prompt_tokens);
    stats_.draft_tokens_by_place[range] += draft.size;
    stats_.accepted_tokens_by_place[range] += accepted;
    if (accepted == draft.size) {
        request.window = std::min<double>(request.window + policy_.window_increase, policy_.max_draft_tokens);
    } else if (2 * accepted < draft.size) {
        request.window = std::max(1.0, request.window * policy_.window_decrease);
    }
}

bool Drafter::refresh_history(Request& request) {
    if (!request.entry && request.num_created != index_->num_created()) {
        request.num_created = index_->num_created();
        request.entry = index_->find(request.key);
    }
    if (!request.entry || request.version == request.entry->version()) return false;
    request.version = request.entry->version();
    request.past = request.entry->history();
    size_t kept = 0;  // places in siblings' texts stay valid
    for (size_t i = 0; i < request.num_cursors; ++i) {
        if (request.cursors[i].next & kLive) request.cursors[kept++] = request.cursors[i];
    }
    request.num_cursors = kept;
    return true;
}

void Drafter::start_at_beginnings(Request& request) {
    std::array<Position, kMaxCursors> places;
    size_t count = request.past ? request.past->starts(places.data(), places.size()) : 0;
    for (size_t i = 0; i < count; ++i) consider(request, {places[i], 0});
    count = request.live ? request.live->starts(request.live_text, places.data(), places.size()) : 0;
    for (size_t i = 0; i < count; ++i) consider(request, {places[i], 0});
}

void Drafter::propose(Request& request, Span<Token> context, int room) {
    request.draft.size = request.draft.num_predicted = 0;
    const bool renewed = refresh_history(request);
    if (request.past || request.live) follow(request, context, renewed);
    request.seen_tokens = context.size();
    const int window = policy_.length == DraftLength::kAimd ? static_cast<int>(request.window) : policy_.max_draft_tokens;
    const int64_t left = request.max_tokens - static_cast<int64_t>(context.size()) - 1;
    const int limit = std::min({window, policy_.max_draft_tokens, room});
    vote(request, context, static_cast<int>(std::clamp<int64_t>(left, 0, std::max(0, limit))));
}

void Drafter::prefetch(const Request& request) {
    for (size_t c = 0; c < request.num_cursors; ++c) {
        const Position place = request.cursors[c].next;
        if (!(place & kLive)) __builtin_prefetch(request.past->address(place));
    }
}

void Drafter::follow(Request& request, Span<Token> context, bool search_anyway) {
    const Texts texts = request.texts();
    const Span<Token> added = context.subspan(std::min(request.seen_tokens, context.size()));
    size_t kept = 0;
    for (size_t c = 0; c < request.num_cursors; ++c) {
        Cursor cursor = request.cursors[c];
        const Token* start = texts.address(cursor.next);
        Walk walk = cursor.walk(texts);
        if (!walk.follow(added, policy_.rejoin)) continue;
        cursor.stay(walk, start);
        request.cursors[kept++] = cursor;
    }
    request.num_cursors = kept;
    float best_score = 0.0f;
    for (size_t c = 0; c < request.num_cursors; ++c) best_score = std::max(best_score, request.cursors[c].score);
    if (search_anyway || best_score < kConfidentScore) search(request, context);
}

void Drafter::search(Request& request, Span<Token> context) {
    std::array<Match, kMaxCursors> matches;
    size_t found = request.past ? request.past->find_suffix(context, matches.data(), matches.size()) : 0;
    for (size_t i = 0; i < found; ++i) {
        if (request.past->at(matches[i].next) != kEnd) consider(request, matches[i]);
    }
    found = request.live ? request.live->find_suffix(context, request.live_text, matches.data(), matches.size()) : 0;
    for (size_t i = 0; i < found; ++i) consider(request, matches[i]);
}

void Drafter::consider(Request& request, const Match& match) {
    Cursor* const begin = request.cursors.data();
    Cursor* const end = begin + request.num_cursors;
    if (std::any_of(begin, end, [&](const Cursor& cursor) { return cursor.next == match.next; })) return;
    Cursor* place = end;
    if (request.num_cursors == kMaxCursors) {
        place = std::min_element(begin, end, [](const Cursor& a, const Cursor& b) { return a.score < b.score; });
        if (place->score >= static_cast<float>(match.length)) return;
    } else {
        ++request.num_cursors;
    }
    const float weight =
        match.next & kLive ? static_cast<float>(policy_.sibling_weight) : request.past->weight_at(match.next);
    *place = {match.next, kNowhere, static_cast<float>(match.length), weight, 0};
}

void Drafter::vote(Request& request, Span<Token> context, int limit) {
    const Texts texts = request.texts();
    Ballot ballot;
    // The order of cursors means nothing.
    Cursor* const cursors = request.cursors.data();
    if (request.num_cursors > kMaxVoters) {
        std::nth_element(cursors, cursors + kMaxVoters, cursors + request.num_cursors,
                         [](const Cursor& a, const Cursor& b) { return a.vote() > b.vote(); });
    }
    ballot.num_voters = std::min(request.num_cursors, kMaxVoters);
    for (size_t v = 0; v < ballot.num_voters; ++v) ballot.voters[v] = {cursors[v].walk(texts), cursors[v].weight};
    // The end of the text so far, for phrases: context, then draft.
    std::array<Token, PhraseTable::kMaxOrder + kMaxDraftTokens + 1> text;
    const bool phrases = policy_.phrases && context.size() >= PhraseTable::kMaxOrder;
    if (phrases) std::copy(context.end() - PhraseTable::kMaxOrder, context.end(), text.begin());

    Draft& draft = request.draft;
    float likelihood = 1.0f;
    for (size_t i = 0; i <= static_cast<size_t>(limit); ++i) {
        Guess guess = count(ballot);
        if (phrases && guess.probability < kPhraseBelow) ask_phrases(guess, text.data() + PhraseTable::kMaxOrder + i);
        if (guess.token == kEnd || guess.token >= policy_.vocab_size) return;
        likelihood *= guess.probability;
        draft.tokens[i] = guess.token;
        draft.cells[i] = guess.cell;
        draft.likelihoods[i] = likelihood;
        draft.num_predicted = static_cast<int>(i) + 1;
        if (static_cast<int>(i) == limit || likelihood < policy_.min_acceptance) return;
        draft.size = static_cast<int>(i) + 1;
        text[PhraseTable::kMaxOrder + i] = guess.token;
        size_t kept = 0;
        for (size_t v = 0; v < ballot.num_voters; ++v) {
            Voter& voter = ballot.voters[v];
            if (!voter.walk.follow({&guess.token, 1}, policy_.rejoin)) continue;
            if (kept < v) ballot.voters[kept] = voter;
            ++kept;
        }
        ballot.num_voters = kept;
    }
}

Drafter::Guess Drafter::count(const Ballot& ballot) const {
    Guess guess;
    bool unanimous = true;
    for (size_t v = 0; v < ballot.num_voters; ++v) {
        const Walk& walk = ballot.voters[v].walk;
        const Token token = *walk.next;
        if (token == kEnd) continue;
        if (guess.token == kEnd) guess.token = token;
        unanimous &= token == guess.token;
        guess.score = std::max(guess.score, walk.score);
    }
    if (guess.token == kEnd) return guess;
    if (!unanimous) settle(ballot, guess);
    guess.cell = AcceptanceTable::cell(guess.score, guess.share, 0);
    guess.probability = acceptance_.probability(guess.cell);
    return guess;
}

void Drafter::settle(const Ballot& ballot, Guess& guess) const {
    struct Candidate {
        Token token;
        float votes;
        float strongest;
        float score;
    };
    std::array<Candidate, kMaxCursors> candidates;
    size_t num_candidates = 0;
    for (size_t v = 0; v < ballot.num_voters; ++v) {
        const Walk& walk = ballot.voters[v].walk;
        const Token token = *walk.next;
        if (token == kEnd) continue;
        size_t c = 0;
        while (c < num_candidates && candidates[c].token != token) ++c;
        if (c == num_candidates) candidates[num_candidates++] = {token, 0.0f, 0.0f, 0.0f};
        Candidate& candidate = candidates[c];
        const float vote = vote_of(ballot.voters[v].weight, walk.score);
        candidate.votes += vote;
        candidate.strongest = std::max(candidate.strongest, vote);
        candidate.score = std::max(candidate.score, walk.score);
    }
    const float agreement = static_cast<float>(policy_.agreement_weight);
    float total = 0.0f, most = 0.0f;
    for (size_t c = 0; c < num_candidates; ++c) {
        const Candidate& candidate = candidates[c];
        const float votes = candidate.strongest + agreement * (candidate.votes - candidate.strongest);
        total += votes;
        if (votes <= most) continue;
        most = votes;
        guess.token = candidate.token;
        guess.score = candidate.score;
    }
    guess.share = most / total;
}

void Drafter::ask_phrases(Guess& guess, const Token* tail) const {
    const PhraseGuess phrase = phrases_.guess(tail);
    if (phrase.token == kEnd) return;
    if (guess.token != kEnd) {
        const bool agrees = phrase.token == guess.token;
        const int opinion = AcceptanceTable::opinion(phrase.order, phrase.hits, agrees);
        guess.cell = AcceptanceTable::cell(guess.score, guess.share, opinion);
        guess.probability = acceptance_.probability(guess.cell);
        if (agrees) return;
    }
    const AcceptanceTable::Cell cell = AcceptanceTable::phrase_cell(phrase.order, phrase.hits);
    const float probability = acceptance_.probability(cell);
    if (probability <= guess.probability) return;
    guess.token = phrase.token;
    guess.cell = cell;
    guess.probability = probability;
}

void Drafter::spend_budget(const std::vector<Row>& rows, bool pads_rows) {
    const bool retry = steps_of_a_kind_ >= kRetrySteps;
    if (retry && !step_.drafted) return;
    DraftBudget budget;
    int num_rows = 0;
    for (const Row& row : rows) {
        if (row.slot < 0) continue;
        ++num_rows;
        const Draft& draft = request_of(row.slot).draft;
        for (int i = 0; i < draft.size; ++i) budget.add(draft.likelihoods[static_cast<size_t>(i)], i + 1);
    }
    const bool compare = retry || !cost_.knows_undrafted(num_rows);
    const float threshold = compare ? kDraftNothing : budget.threshold(num_rows, cost_, pads_rows);
    for (const Row& row : rows) {
        if (row.slot < 0) continue;
        Draft& draft = request_of(row.slot).draft;
        int kept = 0;  // likelihoods never rise along a draft
        while (kept < draft.size && draft.likelihoods[static_cast<size_t>(kept)] >= threshold) ++kept;
        draft.size = kept;
    }
}

}  // namespace rhyme
