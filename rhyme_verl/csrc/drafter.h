// Drafts the next tokens of running requests from their prompts' histories and their running siblings.
//
// A request follows several remembered texts at once (cursors), so a step costs the tokens it added, not the context. The
// texts, and counts of what followed short contexts, are experts (experts.h) whose say is mixed into one prediction with a
// likelihood (mixer.h). A draft ends where the likelihood that all of it is accepted falls below a floor. Over the whole
// batch a budget then drops the tokens that do not pay at the learnt cost of steps (budget.h, step_cost.h).
//
// Lifetimes: a Row's context is read only during draft(); a draft stays until the next one; a request's pointers into
// texts are valid while it holds the history (shared) and is a member of its group (siblings.h); places in texts are kept
// between steps, pointers to them are not. Not thread-safe; the histories may be updated from another thread meanwhile.
// Inside, rows are drafted for at the same time: that changes a row's own request and reads all else.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "budget.h"
#include "context_counts.h"
#include "cursor.h"
#include "experts.h"
#include "history_index.h"
#include "mixer.h"
#include "row_threads.h"
#include "siblings.h"
#include "step_account.h"

namespace rhyme {

struct DraftPolicy {
    bool cost_aware;       // drop tokens that do not pay; false: draft all that is likely enough
    int max_draft_tokens;
    int num_threads;       // that draft for the rows of a large batch
    int vocab_size;        // ids from this on are never drafted
    double min_acceptance;    // a token is drafted only if it and all before it are this likely to be accepted
    int64_t max_live_tokens;  // of all siblings; over it, finished ones go before their history has come
    // Parts that can be switched off to measure what they contribute.
    bool siblings;           // follow the other running answers to the prompt
    bool common;             // count contexts over all prompts
    bool rejoin;             // go on in a text after a difference; false: search anew
    bool stragglers_first;   // weigh requests by what their answers are expected to get still
};

// What the engine's next step may hold, whatever a policy would like.
struct StepBound {
    int max_tokens;  // scheduled tokens: one for each row, and the drafts
    // Sampling works on as many tokens for every row as for the one with the longest draft; these are bounded, too.
    bool pads_rows;
};

class Drafter {
  public:
    static constexpr int kMaxDraftTokens = 127;

    Drafter(std::shared_ptr<const HistoryIndex> index, const DraftPolicy& policy);

    // Start a request, given the tokens it starts from, how many it may add, and how long its answer is expected to be
    // (0: unknown) where the prompt has no history yet. Its slot is valid until close(). Here and in draft(), throws
    // std::invalid_argument for negative token ids.
    int open(Span<Token> prompt, int max_new_tokens, int expected_tokens = 0);
    void close(int slot);
    bool is_open(int slot) const {
        return slot >= 0 && static_cast<size_t>(slot) < requests_.size() && requests_[static_cast<size_t>(slot)].open;
    }

    struct Row {
        int slot;             // -1: draft nothing (its prompt is still being prefilled)
        Span<Token> context;  // all tokens so far, prompt and answer
        int room;             // most tokens that may be drafted
    };

    // Drafts for a batch, once an engine step; `now` in seconds of any monotonic clock. Read them with draft_of().
    void draft(const std::vector<Row>& rows, StepBound bound, double now);
    size_t num_slots() const { return requests_.size(); }
    Span<Token> draft_of(int slot) const { return requests_[static_cast<size_t>(slot)].draft.view(); }

    // Take the cost of steps from elsewhere, as if they had been run.
    void observe_cost(StepSize size, bool drafted, double seconds) { account_.cost().observe(size, drafted, seconds); }

    const DraftStats& stats() const { return stats_; }

    // Empty if all invariants hold, else what is wrong.
    const char* check_integrity() const;

  private:
    static constexpr size_t kMaxCursors = 16;  // texts followed at once, of which the best predict
    static constexpr size_t kCommonContexts = size_t{1} << 20;

    struct Draft {
        std::array<Token, kMaxDraftTokens + 1> tokens;
        std::array<float, kMaxDraftTokens + 1> likelihoods;  // that a token and all before it are accepted
        std::vector<Prediction> predictions;
        int size = 0;           // tokens to verify
        int num_predicted = 0;  // from the first on; those beyond `size` were predicted, but are not drafted
        int64_t call = 0;       // of draft() that made it

        Span<Token> view() const { return {tokens.data(), static_cast<size_t>(size)}; }
    };

    struct Request {
        bool open = false;
        bool is_new = true;  // has not been drafted for; all but its newest token may be from before it was opened
        PromptKey key = 0;   // of its first prompt, as far as known
        size_t prompt_tokens = 0;
        int64_t max_tokens = 0;    // that its context may have at its end
        int expected_tokens = 0;   // of its answer, if its prompt has no history; 0: unknown
        size_t seen_tokens = 0;    // of the context, that the cursors have followed
        uint64_t version = 0;      // of the history that the cursors point into
        uint64_t num_created = 0;  // of the index, when this request's history was last looked for
        float weight = 1.0f;       // of its tokens, in the budget
        std::shared_ptr<HistoryEntry> entry;
        std::shared_ptr<const PromptHistory> past;
        LiveGroup* live = nullptr;
        int live_text = -1;
        size_t num_cursors = 0;
        std::array<Cursor, kMaxCursors> cursors;
        Draft draft;

        Texts texts() const { return {past.get(), live}; }
    };

    Request& request_of(int slot) { return requests_[static_cast<size_t>(slot)]; }
    void take_in(Request& request, Span<Token> context);
    void verify(Request& request, Span<Token> added);
    double expected_rest(const Request& request, size_t context_tokens) const;
    bool refresh_history(Request& request);
    void start_at_beginnings(Request& request);
    void propose(Request& request, Span<Token> context, int room);
    void advance_cursors(Request& request, Span<Token> context, bool search_anyway);
    void search(Request& request, Span<Token> context);
    void consider(Request& request, const Match& match);
    Walks best_walks(Request& request) const;
    void predict(Request& request, Span<Token> context, int limit);
    void weigh(const std::vector<Row>& rows);
    void spend_budget(const std::vector<Row>& rows, bool pads_rows);
    void cut_longest(const std::vector<Row>& rows, int max_draft_tokens);
    void begin_step(const std::vector<Row>& rows, bool pads_rows, double now);

    std::shared_ptr<const HistoryIndex> index_;
    DraftPolicy policy_;
    Mixer mixer_;
    ContextCounts common_;  // of all prompts
    StepAccount account_;
    Siblings siblings_;
    RowThreads threads_;
    std::vector<Request> requests_;
    std::vector<int> free_slots_;
    int64_t num_calls_ = 0;  // of draft()
    DraftStats stats_;
};

}  // namespace rhyme
