// Python bindings: arrays in, lists out. The GIL is released while the core works, and no array is kept after the call.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <climits>
#include <numeric>
#include <string>

#include "drafter.h"
#include "history_index.h"

namespace py = pybind11;
using namespace py::literals;
using namespace rhyme;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
Span<T> view(const Array<T>& values) {
    if (values.ndim() != 1) throw py::value_error("expected a 1-d array");
    return {values.data(), static_cast<size_t>(values.size())};
}

void check_rows(const py::array_t<Token>& tokens, const char* what) {
    if (tokens.ndim() != 2 || tokens.strides(1) != static_cast<py::ssize_t>(sizeof(Token))) {
        throw py::value_error(std::string(what) + " must be a 2-d int32 array with contiguous rows");
    }
}

// Refuses a slot that is not open, or that another row of the batch has taken. `taken` has a value per slot.
void take_slot(const Drafter& drafter, int32_t slot, std::vector<char>& taken) {
    if (!drafter.is_open(slot)) throw py::value_error("a row has a slot that is not open");
    if (taken[static_cast<size_t>(slot)]++) throw py::value_error("two rows have the same slot");
}

void update(HistoryIndex& index, PromptKey prompt, const Array<Token>& tokens, const Array<int32_t>& lengths,
            const Array<int64_t>& steps, const Array<uint64_t>& ids) {
    const AnswerBatch batch{view(tokens), view(lengths), view(steps), view(ids)};
    const size_t count = batch.lengths.size();
    if (batch.steps.size() != count || batch.ids.size() != count) {
        throw py::value_error("lengths, steps and ids must have one value per answer");
    }
    py::gil_scoped_release release;
    const size_t total = std::accumulate(batch.lengths.begin(), batch.lengths.end(), size_t{0});
    if (std::ranges::any_of(batch.lengths, [](int32_t length) { return length < 0; }) || total != batch.tokens.size()) {
        throw py::value_error("lengths must be >= 0 and add up to the tokens");
    }
    check_tokens(batch.tokens);
    index.update(prompt, batch);
}

py::list draft_batch(Drafter& drafter, const py::array_t<Token>& token_ids, const Array<int32_t>& num_tokens,
                     const Array<int32_t>& slots, int max_model_len, double now, int max_step_tokens,
                     int max_sampled_rows, int step_tokens) {
    if (max_sampled_rows < 0) throw py::value_error("max_sampled_rows must be >= 0");
    check_rows(token_ids, "token_ids");
    const py::ssize_t num_rows = slots.size();
    if (token_ids.shape(0) < num_rows || num_tokens.size() < num_rows) {
        throw py::value_error("token_ids and num_tokens must have a row for each slot");
    }
    Drafter::Arrival arrival{{max_step_tokens, max_sampled_rows}, now, step_tokens};
    std::vector<char> taken(drafter.num_slots());
    for (py::ssize_t i = 0; i < num_rows; ++i) {
        const int32_t length = num_tokens.data()[i], slot = slots.data()[i];
        if (length < 0 || length > token_ids.shape(1)) throw py::value_error("num_tokens is outside its row");
        if (slot < 0) continue;
        take_slot(drafter, slot, taken);
        const Span<Token> context(token_ids.data(i, 0), static_cast<size_t>(length));
        arrival.rows.push_back({slot, context, std::max(0, max_model_len - length - 1)});
    }
    // Prompts that are still being prefilled take the tokens of drafts.
    if (static_cast<py::ssize_t>(arrival.rows.size()) < num_rows) arrival.bound.max_tokens = 0;
    {
        py::gil_scoped_release release;
        drafter.draft(arrival);
    }
    py::list result(num_rows);
    for (py::ssize_t i = 0; i < num_rows; ++i) {
        const int32_t slot = slots.data()[i];
        const Span<Token> draft = slot < 0 ? Span<Token>() : drafter.draft_of(slot);
        py::list tokens(draft.size());
        for (size_t j = 0; j < draft.size(); ++j) tokens[j] = draft[j];
        result[static_cast<size_t>(i)] = std::move(tokens);
    }
    return result;
}

// Appends the sampled tokens of each row, which end at the first negative one, to its context, and adds the row to the
// arrival. `rooms`: maximum number of draft tokens, negative if the row leaves. Throws if a context does not have its
// expected length before. Rows without new tokens, which are still being prefilled, are left out.
void take_in(Drafter& drafter, const Array<int32_t>& slots, const py::array_t<Token>& sampled,
             const Array<int32_t>& rooms, const Array<int32_t>& expected, Drafter::Arrival& arrival) {
    check_rows(sampled, "sampled");
    const py::ssize_t count = slots.size();
    if (sampled.shape(0) < count || rooms.size() < count || (expected.size() > 0 && expected.size() < count)) {
        throw py::value_error("sampled, rooms and expected must have a row for each slot");
    }
    std::vector<char> taken(drafter.num_slots());
    for (py::ssize_t i = 0; i < count; ++i) {
        const int32_t slot = slots.data()[i], room = rooms.data()[i];
        if (slot < 0) continue;
        take_slot(drafter, slot, taken);
        const Token* tokens = sampled.data(i, 0);
        size_t width = 0;
        while (width < static_cast<size_t>(sampled.shape(1)) && tokens[width] >= 0) ++width;
        if (width == 0) continue;
        const size_t length = drafter.context_of(slot).size();
        if (room >= 0 && expected.size() > 0 && length != static_cast<size_t>(expected.data()[i])) {
            throw py::value_error("row " + std::to_string(i) + " has " + std::to_string(length) +
                                  " tokens, but the scheduler counts " + std::to_string(expected.data()[i]));
        }
        drafter.extend_context(slot, {tokens, width});
        (room < 0 ? arrival.leaving : arrival.rows)
            .push_back({slot, drafter.context_of(slot), drafter.has_ended(slot) ? 0 : std::max(0, room)});
    }
}

void draft_first(Drafter& drafter, const Array<int32_t>& slots, const py::array_t<Token>& sampled,
                 const Array<int32_t>& rooms, const Array<int32_t>& expected, py::array_t<Token> drafts,
                 Array<int32_t> lengths, double now, int max_step_tokens, int max_sampled_rows, int num_rows,
                 int step_tokens) {
    const py::ssize_t count = slots.size();
    if (drafts.ndim() != 2 || drafts.shape(0) < count || lengths.size() < count) {
        throw py::value_error("drafts and lengths must have a row for each slot");
    }
    Drafter::Arrival arrival{{max_step_tokens, max_sampled_rows, num_rows}, now, step_tokens};
    take_in(drafter, slots, sampled, rooms, expected, arrival);
    auto out = drafts.mutable_unchecked<2>();
    int32_t* sizes = lengths.mutable_data();
    py::gil_scoped_release release;
    drafter.draft_first(arrival);
    for (py::ssize_t i = 0; i < count; ++i) {
        const int32_t slot = slots.data()[i];
        const bool drafts_now = slot >= 0 && rooms.data()[i] > 0;
        const Span<Token> draft = drafts_now ? drafter.draft_of(slot) : Span<Token>();
        sizes[i] = static_cast<int32_t>(std::min<py::ssize_t>(static_cast<py::ssize_t>(draft.size()), out.shape(1)));
        for (int32_t j = 0; j < sizes[i]; ++j) out(i, j) = draft[static_cast<size_t>(j)];
    }
}

bool consider(Drafter& drafter, const Array<int32_t>& slots, const py::array_t<Token>& sampled,
              const Array<int32_t>& rooms, double now, int max_step_tokens, int max_sampled_rows, int num_rows,
              int step_tokens, bool is_timed) {
    Drafter::Arrival arrival{{max_step_tokens, max_sampled_rows, num_rows}, now, step_tokens};
    take_in(drafter, slots, sampled, rooms, Array<int32_t>(), arrival);
    py::gil_scoped_release release;
    return drafter.consider(arrival, is_timed);
}

void learn(Drafter& drafter, const Array<int32_t>& slots) {
    std::vector<Drafter::Row> rows;
    for (py::ssize_t i = 0; i < slots.size(); ++i) {
        const int32_t slot = slots.data()[i];
        if (slot >= 0 && drafter.is_open(slot)) rows.push_back({slot, drafter.context_of(slot), 0});
    }
    py::gil_scoped_release release;
    drafter.learn(rows);
}

void bind_history(py::module_& m) {
    py::class_<IndexStats>(m, "IndexStats")
        .def_readonly("num_prompts", &IndexStats::num_prompts)
        .def_readonly("num_answers", &IndexStats::num_answers)
        .def_readonly("num_tokens", &IndexStats::num_tokens)
        .def_readonly("num_bytes", &IndexStats::num_bytes)
        .def_readonly("num_evicted_tokens", &IndexStats::num_evicted_tokens);

    py::class_<HistoryIndex, std::shared_ptr<HistoryIndex>>(m, "HistoryIndex")
        .def(py::init([](int window_epochs, int64_t max_tokens_per_prompt, int64_t max_bytes) {
                 if (window_epochs < 1 || max_tokens_per_prompt < 1 || max_bytes < 1) {
                     throw py::value_error("the limits of a HistoryIndex must be >= 1");
                 }
                 if (max_tokens_per_prompt >= kLive / 2) throw py::value_error("max_tokens_per_prompt is too large");
                 return std::make_shared<HistoryIndex>(HistoryLimits{window_epochs, max_tokens_per_prompt, max_bytes});
             }),
             py::kw_only(), "window_epochs"_a, "max_tokens_per_prompt"_a, "max_bytes"_a)
        .def("update", &update, "prompt_key"_a, "tokens"_a, "lengths"_a, "steps"_a, "ids"_a,
             "Merge finished answers into a prompt's history. tokens: int32 [sum of lengths], one answer after another; "
             "lengths: int32 [answers]; steps: int64 [answers], numbers of rollouts; ids: uint64 [answers], an answer "
             "replaces an earlier one with the same id.")
        .def(
            "find_suffix",
            [](const HistoryIndex& index, const Array<Token>& prompt, const Array<Token>& context, size_t max_matches) {
                std::vector<std::pair<Token, int>> result;
                const FoundEntry found = index.find(view(prompt));
                if (!found.entry) return result;
                const std::shared_ptr<const PromptHistory> history = std::atomic_load(&found.entry->history);
                history->find_suffix(view(context), max_matches, [&](const Match& match) {
                    result.emplace_back(history->at(match.next), match.length);
                });
                return result;
            },
            "prompt"_a, "context"_a, "max_matches"_a = 16,
            "Past occurrences of the end of `context`, newest first: (next token or -1 at an answer's end, match length).")
        .def("stats", &HistoryIndex::stats, py::call_guard<py::gil_scoped_release>())
        .def("check_integrity", &HistoryIndex::check_integrity);
}

void bind_budget(py::module_& m) {
    py::class_<StepCost>(m, "StepCost")
        .def(py::init<>())
        .def(
            "observe",
            [](StepCost& cost, int tokens, bool drafted, double seconds, int sampled) {
                cost.observe({tokens, std::max(tokens, sampled)}, drafted, seconds);
            },
            "tokens"_a, "drafted"_a, "seconds"_a, "sampled"_a = 0)
        .def("observe_wait", &StepCost::observe_wait, "tokens"_a, "seconds"_a)
        .def(
            "seconds",
            [](const StepCost& cost, int tokens, bool drafted, int sampled) {
                return cost.seconds({tokens, std::max(tokens, sampled)}, drafted);
            },
            "tokens"_a, "drafted"_a, "sampled"_a = 0);

    py::class_<DraftBudget>(m, "DraftBudget")
        .def(py::init<>())
        .def("add", &DraftBudget::add, "likelihood"_a, "place"_a = 1)
        .def(
            "choose",
            [](const DraftBudget& budget, int num_rows, const StepCost& cost, bool pads_rows, bool must_draft,
               int max_tokens) {
                const DraftBudget::Choice choice = budget.choose(num_rows, cost, pads_rows, must_draft, max_tokens);
                return std::make_pair(choice.threshold(), choice.spare);
            },
            "num_rows"_a, "cost"_a, "pads_rows"_a = false, "must_draft"_a = false, "max_tokens"_a = INT_MAX,
            "(lowest likelihood at which all tokens are verified, number of less likely tokens that are)");
}

void bind_drafter(py::module_& m) {
    py::class_<DraftStats>(m, "DraftStats")
        .def_readonly("num_steps", &DraftStats::num_steps)
        .def_readonly("num_generated_tokens", &DraftStats::num_generated_tokens)
        .def_readonly("num_drafts", &DraftStats::num_drafts)
        .def_readonly("num_draft_tokens", &DraftStats::num_draft_tokens)
        .def_readonly("num_accepted_tokens", &DraftStats::num_accepted_tokens)
        .def_readonly("saved_seconds", &DraftStats::saved_seconds)
        .def_readonly("draft_tokens_by_place", &DraftStats::draft_tokens_by_place)
        .def_readonly("accepted_tokens_by_place", &DraftStats::accepted_tokens_by_place)
        .def_readonly("tokens_by_prediction", &DraftStats::tokens_by_prediction)
        .def_readonly("accepted_by_prediction", &DraftStats::accepted_by_prediction)
        .def_readonly("sum_by_prediction", &DraftStats::sum_by_prediction);

    const auto as_begun = StepAccount::kAsBegun;
    py::class_<Drafter>(m, "Drafter")
        .def(py::init([](std::shared_ptr<HistoryIndex> index, bool cost_aware, int max_draft_tokens, int num_threads,
                         int vocab_size, double min_acceptance, int64_t max_live_tokens, bool siblings, bool common,
                         bool rejoin) {
                 if (max_draft_tokens < 1 || max_draft_tokens > Drafter::kMaxDraftTokens) {
                     throw py::value_error("max_draft_tokens must be from 1 to 127");
                 }
                 const DraftPolicy policy{cost_aware,     max_draft_tokens, num_threads, vocab_size,
                                          min_acceptance, max_live_tokens,  siblings,    common,     rejoin};
                 return std::make_unique<Drafter>(std::move(index), policy);
             }),
             "index"_a.none(false), py::kw_only(), "cost_aware"_a, "max_draft_tokens"_a, "num_threads"_a, "vocab_size"_a,
             "min_acceptance"_a, "max_live_tokens"_a, "siblings"_a = true, "common"_a = true, "rejoin"_a = true)
        .def(
            "open",
            [](Drafter& drafter, const Array<Token>& prompt, int max_new_tokens, size_t first_prompt_tokens) {
                return drafter.open(view(prompt), std::max(0, max_new_tokens), first_prompt_tokens);
            },
            "prompt"_a, "max_new_tokens"_a = INT_MAX, "first_prompt_tokens"_a = 0,
            "Start a request; returns its slot. max_new_tokens: bound on its answer. first_prompt_tokens: length of the "
            "answer's first prompt, with which `prompt` begins and after which it holds the answer so far; 0: not known.")
        .def(
            "close",
            [](Drafter& drafter, int slot) {
                if (!drafter.is_open(slot)) throw py::value_error("the slot is not open");
                drafter.close(slot);
            },
            "slot"_a)
        .def("draft", &draft_batch, "token_ids"_a, "num_tokens"_a, "slots"_a, "max_model_len"_a, "now"_a,
             "max_step_tokens"_a = INT_MAX, "max_sampled_rows"_a = 0, "step_tokens"_a = as_begun,
             "Draft for a batch, once per engine step; returns a list of token ids per row. token_ids: int32 [rows, "
             "width]; num_tokens: int32 [rows]; slots: int32 [rows], -1 for a row whose prompt is still being prefilled, "
             "and then no row gets a draft; now: seconds of a monotonic clock; max_step_tokens: bound on the next step's "
             "tokens, one per row plus the drafts; max_sampled_rows: bound on rows times (longest draft + 1) if sampling "
             "pads every row to the longest draft, 0 if it does not; step_tokens: all tokens, prompts included, that were "
             "scheduled in the step that has ended, by default those of its rows and drafts.")
        .def(
            "set_context",
            [](Drafter& drafter, int slot, const Array<Token>& context, const Array<Token>& stops) {
                if (!drafter.is_open(slot)) throw py::value_error("the slot is not open");
                drafter.set_context(slot, view(context), view(stops));
            },
            "slot"_a, "context"_a, "stops"_a,
            "Keep a request's context in the drafter: all its token ids so far (1-d int32), and the ids that end it.")
        .def("draft_first", &draft_first, "slots"_a, "sampled"_a, "rooms"_a, "expected"_a, "drafts"_a.noconvert(),
             "lengths"_a.noconvert(), "now"_a, "max_step_tokens"_a, "max_sampled_rows"_a, "num_rows"_a = 0,
             "step_tokens"_a = as_begun,
             "Draft for requests whose contexts are kept, and leave the rest to learn(). slots: int32 [rows], -1 to skip "
             "a row; sampled: int32 [rows, width], new tokens up to the first negative one; rooms: int32 [rows], maximum "
             "number of draft tokens, -1 if the row is not in the next step; expected: int32 [rows], length of each "
             "context before these tokens, or empty; drafts: int32 [rows, K] and lengths: int32 [rows], filled in; "
             "num_rows: requests in the next step, with those that join in it; the rest as for draft().")
        .def("consider", &consider, "slots"_a, "sampled"_a, "rooms"_a, "now"_a, "max_step_tokens"_a, "max_sampled_rows"_a,
             "num_rows"_a = 0, "step_tokens"_a = as_begun, "is_timed"_a = true,
             "Take in the tokens of a step while the next one runs undrafted; returns whether drafts would have paid in "
             "it. is_timed: whether `now` says anything about what steps cost.")
        .def("learn", &learn, "slots"_a, "Learn from the tokens that draft_first() has taken in.")
        .def("launched", &Drafter::launched, "at"_a, "Note when the step after draft_first() has been launched.")
        .def("wants_undrafted", &Drafter::wants_undrafted, "num_rows"_a,
             "Whether an undrafted step of this many rows is wanted, to compare with.")
        .def(
            "observe_cost",
            [](Drafter& drafter, int tokens, bool drafted, double seconds) {
                drafter.observe_cost({tokens, tokens}, drafted, seconds);
            },
            "tokens"_a, "drafted"_a, "seconds"_a, "Learn the cost of a step from elsewhere, as if it had been run.")
        .def_property_readonly("num_live_tokens", &Drafter::num_live_tokens,
                               "Tokens of running answers and their siblings, with 256 for each of their prompts.")
        .def("stats", &Drafter::stats, py::return_value_policy::copy)
        .def("check_integrity", &Drafter::check_integrity);
}

}  // namespace

PYBIND11_MODULE(_core, m) {
    m.doc() = "The compiled core of rhyme_verl: history index and drafter. Knows tokens, not engines.";
    m.def("prompt_key", [](const Array<Token>& prompt) { return HistoryIndex::key_of(view(prompt)); }, "prompt"_a,
          "64-bit key of a prompt's token ids (1-d int32 array).");
    bind_history(m);
    bind_budget(m);
    bind_drafter(m);
}
