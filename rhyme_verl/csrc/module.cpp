// Python bindings: arrays in, lists out, the GIL released while the core works.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "drafter.h"
#include "history_index.h"

namespace py = pybind11;
using namespace rhyme;

namespace {

using TokenArray = py::array_t<Token, py::array::c_style>;

Span<Token> view(const TokenArray& tokens) {
    if (tokens.ndim() != 1) throw py::value_error("tokens must be a 1-d int32 array");
    return {tokens.data(), static_cast<size_t>(tokens.size())};
}

py::list draft_batch(Drafter& drafter, const py::array_t<Token>& token_ids, const py::array_t<int32_t>& num_tokens,
                     const py::array_t<int32_t, py::array::c_style>& slots, int max_model_len, double now) {
    if (token_ids.ndim() != 2 || token_ids.strides(1) != static_cast<py::ssize_t>(sizeof(Token))) {
        throw py::value_error("token_ids must be a 2-d int32 array with contiguous rows");
    }
    const py::ssize_t num_rows = slots.size();
    if (token_ids.shape(0) < num_rows || num_tokens.size() < num_rows) {
        throw py::value_error("token_ids and num_tokens must have a row for each slot");
    }
    std::vector<Drafter::Row> rows(static_cast<size_t>(num_rows));
    for (py::ssize_t row = 0; row < num_rows; ++row) {
        const int32_t length = num_tokens.at(row);
        rows[static_cast<size_t>(row)] = {
            slots.at(row), {token_ids.data(row, 0), static_cast<size_t>(length)}, std::max(0, max_model_len - length - 1)};
    }
    {
        py::gil_scoped_release release;
        drafter.draft(rows, now);
    }
    py::list result(num_rows);
    for (py::ssize_t row = 0; row < num_rows; ++row) {
        const int slot = rows[static_cast<size_t>(row)].slot;
        const Span<Token> draft = slot < 0 ? Span<Token>() : drafter.draft_of(slot);
        py::list tokens(draft.size());
        for (size_t i = 0; i < draft.size(); ++i) tokens[i] = draft[i];
        result[row] = std::move(tokens);
    }
    return result;
}

void bind_stats(py::module_& m) {
    py::class_<IndexStats>(m, "IndexStats")
        .def_readonly("num_prompts", &IndexStats::num_prompts)
        .def_readonly("num_answers", &IndexStats::num_answers)
        .def_readonly("num_tokens", &IndexStats::num_tokens)
        .def_readonly("num_bytes", &IndexStats::num_bytes);
    py::class_<DraftStats>(m, "DraftStats")
        .def_readonly("num_steps", &DraftStats::num_steps)
        .def_readonly("num_generated_tokens", &DraftStats::num_generated_tokens)
        .def_readonly("num_drafts", &DraftStats::num_drafts)
        .def_readonly("num_draft_tokens", &DraftStats::num_draft_tokens)
        .def_readonly("num_accepted_tokens", &DraftStats::num_accepted_tokens);
}

}  // namespace

PYBIND11_MODULE(_core, m) {
    m.doc() = "The compiled core of rhyme_verl: history index and drafter. Knows tokens, not engines.";
    bind_stats(m);

    m.def("prompt_key", [](const TokenArray& prompt) { return HistoryIndex::key_of(view(prompt)); }, py::arg("prompt"),
          "64-bit key of a prompt's token ids (1-d int32 array).");

    py::class_<HistoryIndex, std::shared_ptr<HistoryIndex>>(m, "HistoryIndex")
        .def(py::init([](int gram_tokens, int window_epochs, int64_t max_tokens_per_prompt) {
                 if (gram_tokens < 1 || window_epochs < 1 || max_tokens_per_prompt < 1) {
                     throw py::value_error("gram_tokens, window_epochs and max_tokens_per_prompt must be >= 1");
                 }
                 return std::make_shared<HistoryIndex>(
                     HistoryLimits{gram_tokens, window_epochs, max_tokens_per_prompt});
             }),
             py::kw_only(), py::arg("gram_tokens"), py::arg("window_epochs"), py::arg("max_tokens_per_prompt"))
        .def(
            "add",
            [](HistoryIndex& index, PromptKey prompt, const TokenArray& answer, int64_t step) {
                const Span<Token> tokens = view(answer);
                for (Token token : tokens) {
                    if (token < 0) throw py::value_error("token ids must be >= 0");
                }
                py::gil_scoped_release release;
                index.add(prompt, tokens, step);
            },
            py::arg("prompt_key"), py::arg("answer"), py::arg("step"),
            "Remember a finished answer (1-d int32 array) of a prompt, produced at rollout step `step`.")
        .def(
            "find_suffix",
            [](const HistoryIndex& index, const TokenArray& prompt, const TokenArray& context, size_t max_matches) {
                std::vector<std::pair<Token, int>> result;
                const FoundHistory found = index.find(view(prompt));
                if (!found.history) return result;
                std::lock_guard<std::mutex> lock(found.history->mutex());
                std::vector<Match> matches(max_matches);
                matches.resize(found.history->find_suffix(view(context), matches.data(), matches.size()));
                for (const Match& match : matches) result.emplace_back(found.history->at(match.next), match.length);
                return result;
            },
            py::arg("prompt"), py::arg("context"), py::arg("max_matches") = 24,
            "Past occurrences of the end of `context`, newest first: (next token or -1 at an answer's end, match length).")
        .def("stats", &HistoryIndex::stats, py::call_guard<py::gil_scoped_release>())
        .def("check_integrity", &HistoryIndex::check_integrity);

    py::enum_<DraftLength>(m, "DraftLength")
        .value("fixed", DraftLength::kFixed)
        .value("aimd", DraftLength::kAimd)
        .value("cost_aware", DraftLength::kCostAware);

    py::class_<StepCost>(m, "StepCost")
        .def(py::init<>())
        .def("observe", &StepCost::observe, py::arg("num_tokens"), py::arg("drafted"), py::arg("seconds"))
        .def("seconds", &StepCost::seconds, py::arg("num_tokens"), py::arg("drafted"));

    py::class_<DraftBudget>(m, "DraftBudget")
        .def(py::init<>())
        .def("add", &DraftBudget::add, py::arg("likelihood"))
        .def("threshold", &DraftBudget::threshold, py::arg("num_rows"), py::arg("cost"));

    py::class_<Drafter>(m, "Drafter")
        .def(py::init([](std::shared_ptr<HistoryIndex> index, DraftLength length, int max_draft_tokens,
                         int initial_window, int window_increase, double window_decrease, double min_acceptance) {
                 return std::make_unique<Drafter>(
                     std::move(index),
                     DraftPolicy{length, max_draft_tokens, initial_window, window_increase,
                                                             window_decrease, min_acceptance});
             }),
             py::arg("index"), py::kw_only(), py::arg("length"), py::arg("max_draft_tokens"), py::arg("initial_window"),
             py::arg("window_increase"), py::arg("window_decrease"), py::arg("min_acceptance"))
        .def("open", [](Drafter& drafter, const TokenArray& prompt) { return drafter.open(view(prompt)); },
             py::arg("prompt"), "Start a request; returns its slot.")
        .def("close", &Drafter::close, py::arg("slot"))
        .def("draft", &draft_batch, py::arg("token_ids"), py::arg("num_tokens"), py::arg("slots"),
             py::arg("max_model_len"), py::arg("now"),
             "Draft for a batch, once an engine step; `now` in seconds of a monotonic clock. token_ids: int32 [rows, width]; num_tokens: int32 [rows]; slots: int32 [rows], -1 to "
             "skip a row. Returns a list of token ids per row.")
        .def("stats", &Drafter::stats, py::return_value_policy::copy);
}
