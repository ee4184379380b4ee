// Drafts the next tokens of running requests from their prompts' histories and their running siblings.
//
// A request follows several remembered texts at once (cursors), so a step costs the tokens it added, not the context.
// The cursors vote on every token of the draft, and common phrases of all prompts (PhraseTable) have a say where they
// are unsure. The draft ends where its expected acceptance (AcceptanceTable) falls below a floor. Over the whole batch a
// cost-aware budget then drops the tokens that do not pay (DraftBudget). The paper's AIMD window (longer after a wholly
// accepted draft, shorter after an early rejection) can bound drafts instead, but it knows less than the estimate of
// each token: at the same floor fewer tokens were accepted with it. Not thread-safe; the histories may be updated from
// another thread meanwhile.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "acceptance.h"
#include "budget.h"
#include "cursor.h"
#include "history_index.h"
#include "phrase_table.h"
#include "step_cost.h"

namespace rhyme {

enum class DraftLength { kFixed, kAimd, kCostAware };

struct DraftPolicy {
    DraftLength length = DraftLength::kCostAware;
    int gram_tokens = 3;
    int max_draft_tokens = 16;
    int initial_window = 8;
    int window_increase = 2;
    double window_decrease = 0.5;
    int vocab_size = 1 << 30;       // ids from this on are never drafted
    double min_acceptance = 0.3;    // a token is drafted only if it is at least this likely to be accepted
    double agreement_weight = 0.25;  // of votes beside the strongest for the same token; 0: the best text alone decides
    double sibling_weight = 1.0;    // of running siblings' text; 0: not used at all
    bool phrases = true;
    bool rejoin = true;                       // go on after differences; false: search anew
    int64_t max_live_tokens = int64_t{1} << 22;  // of finished siblings kept until their history comes
};

struct DraftStats {
    // By where in its answer a draft began, in ranges from 0, 64, 128, 256 ... tokens on.
    static constexpr int kRanges = 16;
    static constexpr int kFirstRange = 64;

    int64_t num_steps = 0;  // request-steps: rows of verified forward passes
    int64_t num_generated_tokens = 0;
    int64_t num_drafts = 0;  // verified drafts of at least one token
    int64_t num_draft_tokens = 0;
    int64_t num_accepted_tokens = 0;
    double saved_seconds = 0.0;  // expected: accepted tokens at the cost of undrafted steps, less what drafts cost
    std::array<int64_t, kRanges> draft_tokens_by_place{};
    std::array<int64_t, kRanges> accepted_tokens_by_place{};

    static size_t range_of(size_t place) {
        int range = 0;
        while (place >= static_cast<size_t>(kFirstRange) && range < kRanges - 1) {
            place /= 2;
            ++range;
        }
        return static_cast<size_t>(range);
    }
};

class Drafter {
  public:
    static constexpr int kMaxDraftTokens = 127;

    Drafter(std::shared_ptr<const HistoryIndex> index, const DraftPolicy& policy);

    // Start a request, given the tokens it starts from and how many it may add; its slot is valid until close().
    int open(Span<Token> prompt, int max_new_tokens);
    void close(int slot);
    bool is_open(int slot) const {
        return slot >= 0 && static_cast<size_t>(slot) < requests_.size() && requests_[static_cast<size_t>(slot)].open;
    }

    struct Row {
        int slot;             // -1: draft nothing (its prompt is still being prefilled)
        Span<Token> context;  // all tokens so far, prompt and answer
        int room;             // most tokens that may be drafted
    };

    // What the engine's next step may hold, whatever a policy would like.
    struct StepBound {
        int max_tokens;  // scheduled tokens: one for each row, and the drafts
        // Sampling works on as many tokens for every row as for the one with the longest draft; these are bounded, too.
        bool pads_rows;
    };

    // Drafts for a batch, once an engine step; `now` in seconds of any monotonic clock. Read them with draft_of().
    void draft(const std::vector<Row>& rows, StepBound bound, double now);
    Span<Token> draft_of(int slot) const { return requests_[static_cast<size_t>(slot)].draft.view(); }

    const DraftStats& stats() const { return stats_; }

  private:
    static constexpr size_t kMaxCursors = 16;  // texts followed at once
    static constexpr size_t kMaxVoters = 6;    // of which the best decide on a draft

    struct Draft {
        std::array<Token, kMaxDraftTokens + 1> tokens;
        std::array<AcceptanceTable::Cell, kMaxDraftTokens + 1> cells;
        std::array<float, kMaxDraftTokens + 1> likelihoods;  // that a token and all before it are accepted
        int size = 0;           // tokens to verify
        int num_predicted = 0;  // one more than `size` if the next token was predicted, too, but not drafted

        Span<Token> view() const { return {tokens.data(), static_cast<size_t>(size)}; }
    };

    struct Request {
        bool open = false;
        bool is_new = true;  // has not been drafted for; what it has may have been generated before it was opened
        PromptKey key = 0;  // of its first prompt, as far as known
        size_t prompt_tokens = 0;
        int64_t max_tokens = 0;  // that its context may have at its end
        size_t seen_tokens = 0;  // of the context, that the cursors have followed
        uint64_t version = 0;  // of the history that the cursors point into
        uint64_t num_created = 0;  // of the index, when this request's history was last looked for
        double window = 0;
        std::shared_ptr<HistoryEntry> entry;
        std::shared_ptr<const PromptHistory> past;
        LiveGroup* live = nullptr;
        int live_text = -1;
        size_t num_cursors = 0;
        std::array<Cursor, kMaxCursors> cursors;
        Draft draft;

        Texts texts() const { return {past.get(), live}; }
    };

    struct Voter {
        Walk walk;
        float weight;
    };

    struct Ballot {
        std::array<Voter, kMaxVoters> voters;
        size_t num_voters = 0;
    };

    struct Guess {
        Token token = kEnd;
        float score = 0.0f;  // of the best cursor that proposes it
        float share = 1.0f;  // of the vote
        AcceptanceTable::Cell cell = 0;
        float probability = 0.0f;
    };

    struct Siblings {
        std::unique_ptr<LiveGroup> group;
        int num_open = 0;
        bool queued = false;   // in finished_groups_
        uint64_t version = 0;  // of the prompt's history when the group was begun
    };

    struct Step {  // the engine step that runs between two calls of draft()
        double started = 0.0;
        StepSize size;
        bool drafted = false;
        bool decodes_only = false;  // no prefill in it, as far as is known
    };

    Request& request_of(int slot) { return requests_[static_cast<size_t>(slot)]; }
    void learn_cost(double now);
    void note_saving(int num_rows, int64_t accepted, double elapsed);
    void join_siblings(Request& request, Span<Token> prompt);
    void trim_siblings();
    void take_in(Request& request, Span<Token> context);
    void account(Request& request, Span<Token> added);
    bool refresh_history(Request& request);
    void start_at_beginnings(Request& request);
    void propose(Request& request, Span<Token> context, int room);
    void follow(Request& request, Span<Token> context, bool search_anyway);
    void search(Request& request, Span<Token> context);
    void consider(Request& request, const Match& match);
    static void prefetch(const Request& request);
    void vote(Request& request, Span<Token> context, int limit);
    Guess count(const Ballot& ballot) const;
    void settle(const Ballot& ballot, Guess& guess) const;
    void ask_phrases(Guess& guess, const Token* tail) const;
    void spend_budget(const std::vector<Row>& rows, bool pads_rows);
    void cut_longest(const std::vector<Row>& rows, int max_draft_tokens);

    std::shared_ptr<const HistoryIndex> index_;
    DraftPolicy policy_;
    AcceptanceTable acceptance_;
    PhraseTable phrases_;
    StepCost cost_;
    Step step_;
    int steps_of_a_kind_ = 0;  // with a draft, or without, in a row
    std::vector<Request> requests_;
    std::vector<int> free_slots_;
    std::unordered_map<PromptKey, Siblings> siblings_;
    LengthCounts sibling_lengths_;
    std::deque<PromptKey> finished_groups_;  // oldest first, each once; may name groups that run again
    int64_t num_live_tokens_ = 0;
    DraftStats stats_;
};

}  // namespace rhyme
