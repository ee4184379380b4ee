// Drafts the next tokens of running requests from their prompts' histories.
//
// A request follows several past answers at once (cursors), so a step costs the tokens it added, not the context. The
// cursors vote on every token of the draft; the draft ends where its expected acceptance (AcceptanceTable) falls below a
// floor, and at the request's AIMD window: longer after a wholly accepted draft, shorter after an early rejection
// (RhymeRL, HistoSpec). Over the whole batch a cost-aware budget then drops the tokens that do not pay (DraftBudget).
// Not thread-safe; the histories it reads may be fed from another thread meanwhile.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "acceptance.h"
#include "budget.h"
#include "cursor.h"
#include "history_index.h"
#include "step_cost.h"

namespace rhyme {

enum class DraftLength { kFixed, kAimd, kCostAware };

struct DraftPolicy {
    DraftLength length = DraftLength::kCostAware;
    int max_draft_tokens = 16;
    int initial_window = 4;
    int window_increase = 2;
    double window_decrease = 0.5;
    double min_acceptance = 0.3;  // a token is drafted only if it is at least this likely to be accepted
};

struct DraftStats {
    int64_t num_steps = 0;  // request-steps: rows of verified forward passes
    int64_t num_generated_tokens = 0;
    int64_t num_drafts = 0;  // verified drafts of at least one token
    int64_t num_draft_tokens = 0;
    int64_t num_accepted_tokens = 0;
};

class Drafter {
  public:
    Drafter(std::shared_ptr<const HistoryIndex> index, const DraftPolicy& policy);

    // Start a request, given the tokens it starts from; its slot is valid until close().
    int open(Span<Token> prompt);
    void close(int slot);

    struct Row {
        int slot;             // -1: draft nothing (its prompt is still being prefilled)
        Span<Token> context;  // all tokens so far, prompt and answer
        int room;             // most tokens that may be drafted
    };

    // Drafts for a batch, once an engine step; `now` in seconds of any monotonic clock. Read them with draft_of().
    void draft(const std::vector<Row>& rows, double now);
    Span<Token> draft_of(int slot) const { return requests_[static_cast<size_t>(slot)].draft; }

    const DraftStats& stats() const { return stats_; }

  private:
    struct Request {
        std::shared_ptr<PromptHistory> history;
        size_t seen_tokens = 0;
        uint64_t version = 0;  // of the history that the cursors point into
        double window = 0;
        std::vector<Cursor> cursors;
        std::vector<Token> draft;
        std::vector<AcceptanceTable::Cell> draft_cells;
        std::vector<float> draft_likelihoods;  // that a token and all before it are accepted
        bool open = false;
    };

    struct Step {  // the engine step that runs between two calls of draft()
        double started = 0.0;
        int num_tokens = 0;  // scheduled: a token a row and its draft
        bool drafted = false;
        bool decodes_only = false;  // no prefill in it, as far as is known
    };

    void learn_cost(double now);
    void propose(Request& request, Span<Token> context, int room);
    void spend_budget(const std::vector<Row>& rows);
    void account(Request& request, Span<Token> added);
    void follow(Request& request, Span<Token> context);
    void search(Request& request, Span<Token> context);
    void vote(Request& request, int limit);

    std::shared_ptr<const HistoryIndex> index_;
    DraftPolicy policy_;
    AcceptanceTable acceptance_;
    StepCost cost_;
    Step step_;
    int steps_of_a_kind_ = 0;  // with a draft, or without, in a row
    std::vector<Request> requests_;
    std::vector<int> free_slots_;
    DraftStats stats_;
};

}  // namespace rhyme
