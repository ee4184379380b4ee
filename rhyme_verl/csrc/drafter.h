// Drafts the next tokens of running requests from their prompts' histories and their running siblings.
//
// A request follows several remembered texts at once (cursors), so the time per step depends on the tokens that it added,
// not on the length of its context. Texts and counts of short contexts are experts (experts.h), which a mixer combines into
// one token and its likelihood (mixer.h). A draft ends where the likelihood that all of it is accepted falls below a floor.
// A budget over the batch then drops the tokens that do not pay at the learnt cost of steps (budget.h, step_cost.h).
//
// Order of work: a call of draft() takes in the newest tokens, learns from them, and predicts. Where an accelerator waits for
// the drafts, learning can come after they have been handed over (draft_first(), then learn()); and where it does not wait,
// because the running step has no drafts, consider() takes the tokens in and says whether drafts would pay.
//
// Lifetimes: the prompt of open() and the context of a Row are read only during the call. A span from draft_of() is valid
// until the next open(), close() or draft(). From open() to close(), a request shares ownership of its history and is a
// member of its group, so its pointers to them stay valid (siblings.h). Only positions in texts are kept between steps, no
// pointers into them.
//
// Not thread-safe, except that another thread may update the HistoryIndex. Within draft(), threads work on different rows:
// each changes only its row's request and reads everything else.
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
    bool cost_aware;  // drop tokens that do not pay; false: draft every token that is likely enough and allowed
    int max_draft_tokens;
    int num_threads;  // threads that share the rows of a large batch
    int vocab_size;  // ids >= this are never drafted
    double min_acceptance;  // minimum likelihood that a token and all before it in the draft are accepted
    int64_t max_live_tokens;  // of all groups (siblings.h), a hard bound
    // Parts that are switched off only in ablations.
    bool siblings = true;  // follow the prompt's other running answers
    bool common = true;  // count contexts over all prompts
    bool rejoin = true;  // continue in a text after a difference; false: search again
};

// Hard bounds on the engine's next step.
struct StepBound {
    int max_tokens;  // scheduled tokens: one per row, plus the drafts
    int max_sampled;  // rows times (longest draft + 1), if sampling pads every row to the longest draft; 0 if it does not
    int num_rows = 0;  // of the step; more than those that are drafted for if requests join in it

    bool pads_rows() const { return max_sampled > 0; }
};

class Drafter {
  public:
    static constexpr int kMaxDraftTokens = 127;

    Drafter(std::shared_ptr<const HistoryIndex> index, const DraftPolicy& policy);

    // Starts a request from the tokens in `prompt` and returns its slot, which is valid until close(). `first_prompt_tokens`:
    // length of the answer's first prompt, with which `prompt` begins; 0 if it is not known. Here and in draft(), negative
    // token ids throw std::invalid_argument.
    int open(Span<Token> prompt, int max_new_tokens, size_t first_prompt_tokens = 0);
    void close(int slot);

    // Keeps a request's context here, for callers that have none to pass: `context` is all of it so far. The answer ends with
    // a token of `stops`.
    void set_context(int slot, Span<Token> context, Span<Token> stops);
    // Appends to the context that is kept here.
    void extend_context(int slot, Span<Token> added);
    Span<Token> context_of(int slot) const { return requests_[static_cast<size_t>(slot)].context; }
    // Whether the context that is kept here has ended.
    bool has_ended(int slot) const { return requests_[static_cast<size_t>(slot)].ended; }
    bool is_open(int slot) const {
        return slot >= 0 && static_cast<size_t>(slot) < requests_.size() && requests_[static_cast<size_t>(slot)].open;
    }

    struct Row {
        int slot;
        Span<Token> context;  // all tokens so far, prompt and answer; not owned
        int room;  // maximum number of draft tokens
    };

    // What an engine step has brought.
    struct Arrival {
        StepBound bound;  // on the next step
        double now;  // seconds of any monotonic clock, when the newest tokens came
        int step_tokens;  // all, prompts included, that were scheduled; StepAccount::kAsBegun: those of rows and drafts
        std::vector<Row> rows{};  // that are in the next step
        std::vector<Row> leaving{};  // that are not
    };

    // Drafts for a batch, once per engine step; draft_of() returns the drafts.
    void draft(const Arrival& arrival);
    // The same, but leaves out what the next drafts do not need: learn() with the rows has to follow.
    void draft_first(const Arrival& arrival);
    void learn(const std::vector<Row>& rows);
    void launched(double at) { account_.launched(at); }  // when the step after draft_first() has been launched
    // Takes in the rows' newest tokens while the next step runs undrafted, and returns whether drafts would have paid in
    // it. If the bound has no space for drafts, nothing is predicted. `is_timed`: whether `now` says anything about what
    // steps cost.
    bool consider(const Arrival& arrival, bool is_timed);
    // Whether an undrafted step of this many rows is wanted, because its cost is unknown or long ago.
    bool wants_undrafted(int num_rows) const;
    size_t num_slots() const { return requests_.size(); }
    Span<Token> draft_of(int slot) const { return requests_[static_cast<size_t>(slot)].draft().view(); }

    // Learns the cost of a step from elsewhere, as if it had been run.
    void observe_cost(StepSize size, bool drafted, double seconds) { account_.cost().observe(size, drafted, seconds); }

    const DraftStats& stats() const { return stats_; }
    int64_t num_live_tokens() const { return siblings_.num_tokens(); }  // within DraftPolicy::max_live_tokens

    // Returns a static string: empty if all invariants hold, otherwise what is wrong.
    const char* check_integrity() const;

  private:
    static constexpr size_t kMaxCursors = 16;  // texts followed at once; the best Walks::kMost of them predict
    static constexpr size_t kCommonContexts = size_t{1} << 20;

    struct Draft {
        std::array<Token, kMaxDraftTokens + 1> tokens;
        std::array<float, kMaxDraftTokens + 1> likelihoods;  // [i]: that tokens 0 to i are all accepted
        std::vector<Prediction> predictions;
        int size = 0;  // tokens to verify
        int num_predicted = 0;  // tokens predicted; those from `size` on are not drafted
        int num_accepted = 0;  // of its tokens, once it has been verified
        int64_t call = 0;  // number of the call of draft() that made it

        Span<Token> view() const { return {tokens.data(), static_cast<size_t>(size)}; }
    };

    struct Request {
        bool open = false;
        bool is_new = true;  // draft() has not seen it yet; all but its newest token may predate open()
        PromptKey key = 0;  // of its first prompt, as far as it is known
        size_t prompt_tokens = 0;
        int64_t max_tokens = 0;  // bound on the length of its context
        size_t seen_tokens = 0;  // tokens of the context that the cursors have followed
        size_t learnt_tokens = 0;  // and that have been learnt from; not more than those
        size_t generated_from = 0;  // start of the tokens that came with the newest step
        uint64_t version = 0;  // of the history that the cursors point into
        uint64_t num_created = 0;  // HistoryIndex::num_created() when its history was last looked up
        std::shared_ptr<const HistoryEntry> entry;
        std::shared_ptr<const PromptHistory> past;
        LiveGroup* live = nullptr;  // owned by siblings_; valid until close()
        int live_text = 0;  // 0: none yet; -1: the group has no room for it
        int num_clears = 0;  // of the group that the cursors know
        std::vector<Cursor> cursors;
        std::array<Draft, 2> drafts;  // the newest one, and the one before, whose predictions are yet to be learnt from
        size_t newest = 0;
        std::vector<Token> context;  // if it is kept here, as the following
        std::vector<Token> stops;  // tokens that end it
        bool ended = false;

        Draft& draft() { return drafts[newest]; }
        const Draft& draft() const { return drafts[newest]; }
        Draft& verified() { return drafts[1 - newest]; }
        Texts texts() const { return {past.get(), live}; }
    };

    static constexpr float kFloorShare = 0.4f;  // of the newest threshold, below which tokens are not predicted
    static constexpr float kMostFloor = 0.3f;
    static constexpr int kFloorRows = 32;  // from which on: the threshold of a few rows changes with every step

    Request& request_of(int slot) { return requests_[static_cast<size_t>(slot)]; }
    void receive(const Arrival& arrival);
    void take_in(Request& request, Span<Token> context);
    void learn(Request& request, Span<Token> context);
    void add_to_siblings(Request& request, Span<Token> context);
    void note_seen(Request& request, Span<Token> context);
    bool refresh_history(Request& request);
    void propose(Request& request, Span<Token> context, int room);
    void advance_cursors(Request& request, Span<Token> context, bool search_anyway);
    void search(Request& request, Span<Token> context);
    void consider(Request& request, const Match& match);
    Walks best_walks(Request& request) const;
    void predict(Request& request, Span<Token> context, int limit);
    void propose(const std::vector<Row>& rows, StepBound bound);
    void spend_budget(const std::vector<Row>& rows, bool pads_rows, int max_draft_tokens);
    void begin_step(const std::vector<Row>& rows, bool pads_rows, double now);

    std::shared_ptr<const HistoryIndex> index_;
    DraftPolicy policy_;
    Mixer mixer_;
    ContextCounts common_;  // counts over all prompts
    StepAccount account_;
    StepCost unknown_cost_;  // at which every draft token pays
    Siblings siblings_;
    RowThreads threads_;
    std::vector<Request> requests_;
    std::vector<int> free_slots_;
    int64_t num_calls_ = 0;  // calls of draft() so far
    float least_likelihood_ = 0.0f;  // of tokens that are predicted
    DraftStats stats_;
};

}  // namespace rhyme
