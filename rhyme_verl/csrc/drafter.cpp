#include "drafter.h"

#include <algorithm>
#include <cassert>

namespace rhyme {

namespace {

constexpr float kConfidentScore = 16.0f;  // a cursor with this score makes a search unnecessary
constexpr size_t kMaxFollowed = 1024;     // new tokens; texts that agree with more are searched

}  // namespace

Drafter::Drafter(std::shared_ptr<const HistoryIndex> index, const DraftPolicy& policy)
    : index_(std::move(index)),
      policy_(policy),
      common_(policy.common ? kCommonContexts : 0),
      siblings_(policy.max_live_tokens),
      threads_(policy.num_threads) {}

int Drafter::open(Span<Token> prompt, int max_new_tokens, size_t first_prompt_tokens) {
    check_tokens(prompt);
    if (free_slots_.empty()) {
        free_slots_.push_back(static_cast<int>(requests_.size()));
        requests_.emplace_back();
    }
    const int slot = free_slots_.back();
    free_slots_.pop_back();
    Request& request = request_of(slot);
    request.open = true;
    for (Draft& draft : request.drafts) draft.predictions.resize(static_cast<size_t>(policy_.max_draft_tokens) + 1);
    request.max_tokens = static_cast<int64_t>(prompt.size()) + max_new_tokens;
    request.num_created = index_->num_created();  // read first, so that a history created meanwhile is looked up again
    FoundEntry first;
    if (first_prompt_tokens > 0 && first_prompt_tokens <= prompt.size()) {
        const PromptKey key = HistoryIndex::key_of(prompt.first(first_prompt_tokens));
        first = {index_->find(key), key, first_prompt_tokens};
    } else if (first = index_->find(prompt); !first.entry) {  // the longest prefix that siblings started from, else all
        HistoryIndex::for_each_prefix(prompt, [&](PromptKey key, size_t length) {
            if (length == prompt.size() ? first.prompt_tokens == 0 : siblings_.has(key)) first = {nullptr, key, length};
        });
    }
    if (first.entry) {
        request.version = first.entry->version;
        request.past = std::atomic_load(&first.entry->history);
    }
    request.entry = std::move(first.entry);
    request.key = first.key;
    request.prompt_tokens = first.prompt_tokens;
    if (policy_.siblings) {
        request.live = siblings_.join(request.key, prompt.first(request.prompt_tokens), request.version);
        request.num_clears = request.live->num_clears();
    }
    const auto start = [&](Position first) { request.cursors.push_back({first}); };
    if (request.live) request.live->for_each_start(kMaxCursors / 2, start);
    if (request.past) request.past->for_each_start(kMaxCursors - request.cursors.size(), start);
    request.seen_tokens = request.learnt_tokens = request.prompt_tokens;
    return slot;
}

void Drafter::set_context(int slot, Span<Token> context, Span<Token> stops) {
    check_tokens(context);
    Request& request = request_of(slot);
    request.context.assign(context.begin(), context.end());
    request.stops.assign(stops.begin(), stops.end());
    request.ended = false;
    // Nothing is taken back if tokens were taken in that the context no longer has: their successors are followed instead.
    note_seen(request, context.first(std::min(request.seen_tokens, context.size())));
}

void Drafter::extend_context(int slot, Span<Token> added) {
    check_tokens(added);
    Request& request = request_of(slot);
    request.context.insert(request.context.end(), added.begin(), added.end());
    request.ended |= std::ranges::find_first_of(added, request.stops) != added.end();
}

void Drafter::close(int slot) {
    Request& request = request_of(slot);
    assert(request.open);
    if (request.live) siblings_.leave(request.key, request.live_text);
    request = Request{};
    free_slots_.push_back(slot);
}

void Drafter::draft(const Arrival& arrival) {
    receive(arrival);
    learn(arrival.rows);
    propose(arrival.rows, arrival.bound);
    begin_step(arrival.rows, arrival.bound.pads_rows(), arrival.now);
}

void Drafter::draft_first(const Arrival& arrival) {
    receive(arrival);
    propose(arrival.rows, arrival.bound);
    begin_step(arrival.rows, arrival.bound.pads_rows(), arrival.now);
}

bool Drafter::consider(const Arrival& arrival, bool is_timed) {
    if (!is_timed) account_.disregard();
    receive(arrival);
    learn(arrival.rows);
    learn(arrival.leaving);
    propose(arrival.rows, arrival.bound);
    bool pays = false;
    for (const Row& row : arrival.rows) {
        int& size = request_of(row.slot).draft().size;
        pays |= size > 0;
        size = 0;  // the running step does not verify it
    }
    begin_step(arrival.rows, false, arrival.now);
    if (!is_timed) account_.disregard();
    return pays;
}

bool Drafter::wants_undrafted(int num_rows) const {
    return policy_.cost_aware &&
           ((account_.is_retry() && account_.drafted_last()) || !account_.cost().knows_undrafted(num_rows));
}

// Takes in the rows' newest tokens: what the next drafts need of them.
void Drafter::receive(const Arrival& arrival) {
    for (const Row& row : arrival.rows) {
        check_tokens(row.context.subspan(std::min(row.context.size(), request_of(row.slot).seen_tokens)));
    }
    ++num_calls_;
    account_.end(arrival.now, arrival.step_tokens);
    const int64_t accepted_before = stats_.num_accepted_tokens;
    int num_verified = 0;
    for (const std::vector<Row>* some : {&arrival.rows, &arrival.leaving}) {
        for (const Row& row : *some) {
            Request& request = request_of(row.slot);
            assert(request.open);
            if (row.context.size() <= request.seen_tokens) continue;
            num_verified += !request.is_new;
            take_in(request, row.context);
        }
    }
    for (const Row& row : arrival.leaving) note_seen(request_of(row.slot), row.context);  // the others follow their texts first
    stats_.saved_seconds += account_.saving(num_verified, stats_.num_accepted_tokens - accepted_before, arrival.now);
}

// Siblings use each other's newest tokens, so all rows are learnt from before a draft is predicted, if there is time.
void Drafter::learn(const std::vector<Row>& rows) {
    for (const Row& row : rows) learn(request_of(row.slot), row.context);
    siblings_.catch_up();
}

void Drafter::begin_step(const std::vector<Row>& rows, bool pads_rows, double now) {
    StepSize size;
    int longest = 0;
    for (const Row& row : rows) {
        const int drafted = static_cast<int>(draft_of(row.slot).size());
        size.tokens += 1 + drafted;
        longest = std::max(longest, drafted);
    }
    size.sampled = pads_rows ? static_cast<int>(rows.size()) * (1 + longest) : size.tokens;
    account_.begin(size, longest > 0, now);
}

void Drafter::take_in(Request& request, Span<Token> context) {
    if (request.learnt_tokens < request.seen_tokens) learn(request, context.first(request.seen_tokens));
    request.generated_from = request.is_new ? context.size() - 1 : request.seen_tokens;
    request.newest = 1 - request.newest;
    request.draft().size = request.draft().num_predicted = 0;
    Draft& draft = request.verified();
    if (draft.call + 1 != num_calls_) draft.size = 0;  // the draft has not been verified
    // The request received the accepted draft tokens and one token of the model's own.
    const Span<Token> added = context.subspan(request.generated_from);
    const int most = std::min<int>(draft.size, static_cast<int>(added.size()) - 1);
    int accepted = 0;
    while (accepted < most && draft.tokens[static_cast<size_t>(accepted)] == added[static_cast<size_t>(accepted)])
        ++accepted;
    draft.num_accepted = accepted;
    stats_.num_steps += 1;
    stats_.num_generated_tokens += static_cast<int64_t>(added.size());
    if (draft.size > 0) stats_.add_draft(request.generated_from - request.prompt_tokens, draft.size, accepted);
}

void Drafter::note_seen(Request& request, Span<Token> context) {
    request.seen_tokens = context.size();
    request.learnt_tokens = std::min(request.learnt_tokens, request.seen_tokens);  // a context may have lost tokens
}

// Learns from the tokens that were taken in last.
void Drafter::learn(Request& request, Span<Token> context) {
    if (context.size() <= request.learnt_tokens) return;
    const Span<Token> added = context.subspan(std::min(request.generated_from, context.size()));
    Draft& draft = request.verified();
    // The first prediction that was rejected or not drafted can be checked as well.
    for (int i = 0; i < draft.num_predicted && static_cast<size_t>(i) < added.size() && i <= draft.num_accepted; ++i) {
        const Prediction& prediction = draft.predictions[static_cast<size_t>(i)];
        const Token came = added[static_cast<size_t>(i)];
        if (i < draft.size) stats_.add_prediction(prediction.probability, prediction.token() == came);
        mixer_.learn(prediction, came);
    }
    draft.num_predicted = 0;
    if (request.live) siblings_.grow(*request.live, [&] { add_to_siblings(request, context); });
    if (policy_.common) count_contexts(context, request.generated_from, kMaxOrder, common_);
    request.learnt_tokens = context.size();
}

void Drafter::add_to_siblings(Request& request, Span<Token> context) {
    int& own = request.live_text;
    if (own != 0) return request.live->append(own, context.subspan(request.learnt_tokens));
    const size_t begin = std::min(request.prompt_tokens, context.size());
    own = request.live->enter(context.subspan(begin), static_cast<size_t>(request.max_tokens) - request.prompt_tokens);
    std::erase_if(request.cursors, [own](const Cursor& one) { return LiveGroup::is_in(own, one.next); });
}

bool Drafter::refresh_history(Request& request) {
    if ((!request.entry || request.entry->is_evicted) && request.num_created != index_->num_created()) {
        request.num_created = index_->num_created();
        if (auto entry = index_->find(request.key)) {
            request.entry = std::move(entry);
            request.version = 0;
        }
    }
    if (!request.entry || request.version == request.entry->version) return false;
    request.version = request.entry->version;
    request.past = std::atomic_load(&request.entry->history);
    std::erase_if(request.cursors, [](const Cursor& one) { return !(one.next & kLive); });
    return true;
}

void Drafter::propose(Request& request, Span<Token> context, int room) {
    Draft& draft = request.draft();
    draft.size = draft.num_predicted = 0;
    draft.call = num_calls_;
    request.is_new = false;
    const bool renewed = refresh_history(request);
    if (request.live && request.num_clears != request.live->num_clears()) {
        request.num_clears = request.live->num_clears();
        std::erase_if(request.cursors, [](const Cursor& one) { return (one.next & kLive) != 0; });
    }
    if (request.past || request.live) advance_cursors(request, context, renewed);
    note_seen(request, context);
    const int64_t left = request.max_tokens - static_cast<int64_t>(context.size()) - 1;
    const int64_t limit = std::min<int64_t>({left, policy_.max_draft_tokens, room});
    if (room > 0) predict(request, context, static_cast<int>(std::max<int64_t>(0, limit)));
}

void Drafter::advance_cursors(Request& request, Span<Token> context, bool search_anyway) {
    const Texts texts = request.texts();
    const Span<Token> added = context.subspan(std::min(request.seen_tokens, context.size()));
    if (added.size() > kMaxFollowed) request.cursors.clear();
    float best_score = 0.0f;
    for (Cursor& cursor : request.cursors) {
        Walk walk = cursor.walk(texts);
        if (walk.follow(added, policy_.rejoin)) {
            cursor.stay(walk, texts);
            best_score = std::max(best_score, cursor.score);
        } else {
            cursor.next = kNowhere;
        }
    }
    std::erase_if(request.cursors, [](const Cursor& one) { return one.next == kNowhere; });
    if (search_anyway || best_score < kConfidentScore) search(request, context);
}

void Drafter::search(Request& request, Span<Token> context) {
    const auto add = [&](const Match& match) {
        if ((match.next & kLive) || request.past->at(match.next) != kEnd) consider(request, match);
    };
    if (request.past) request.past->find_suffix(context, kMaxCursors, add);
    if (request.live) request.live->find_suffix(context, request.live_text, kMaxCursors, add);
}

void Drafter::consider(Request& request, const Match& match) {
    if (std::ranges::find(request.cursors, match.next, &Cursor::next) != request.cursors.end()) return;
    const Cursor found{match.next, kNowhere, static_cast<float>(match.length), match.length};
    if (request.cursors.size() < kMaxCursors) {
        request.cursors.push_back(found);
    } else if (const auto worst = std::ranges::min_element(request.cursors, {}, &Cursor::score); worst->score < found.score) {
        *worst = found;
    }
}

const char* Drafter::check_integrity() const {
    size_t num_open = 0;
    for (const Request& request : requests_) {
        num_open += request.open;
        if (request.learnt_tokens > request.seen_tokens) return "a request has learnt more than it has seen";
        for (const Cursor& cursor : request.cursors) {
            if (cursor.next & kLive ? !request.live : !request.past) return "a cursor points into a text that is not held";
        }
    }
    if (num_open + free_slots_.size() != requests_.size()) return "open and free slots do not add up";
    if (const char* problem = siblings_.check_integrity(); *problem) return problem;
    if (!common_.is_in_order()) return "followers of a context are out of order";
    if (!account_.cost().is_finite()) return "a step's cost is not finite";
    return mixer_.check_integrity();
}

}  // namespace rhyme
