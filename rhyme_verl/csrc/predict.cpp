// Predicts drafts: the trunk first, then its branches, best first.
#include <algorithm>

#include "drafter.h"

namespace rhyme {

// A place in a draft, with all that the next token is predicted from. The address of a text does not outlast the call.
struct Drafter::Place {
    Walks walks;
    LogBilinear::Context bins{};  // of the tokens before, the last one first
    std::array<Token, kMaxOrder> tail{};  // the tokens before, the last one last
    size_t known = 0;  // of those in `tail`

    // Moves past a token.
    void advance(Token token, bool rejoin) {
        walks.advance(token, rejoin);
        append(token);
    }
    void append(Token token) {
        std::copy_backward(bins.begin(), bins.end() - 1, bins.end());
        bins[0] = LogBilinear::bin_of(token);
        std::copy(tail.begin() + 1, tail.end(), tail.begin());
        tail.back() = token;
        known = std::min(known + 1, tail.size());
    }
};

namespace {

// A candidate that may become a token of the tree.
struct Candidate {
    float likelihood;
    int16_t parent;
    int16_t rank;  // in the prediction of what follows its parent

    // Ties go to the older parent.
    bool operator<(const Candidate& other) const {
        if (likelihood != other.likelihood) return likelihood < other.likelihood;
        return parent != other.parent ? parent > other.parent : rank > other.rank;
    }
};

// The candidates that are known so far. Each token of the draft has at most one in it, its next child, and all of its
// children are in order, so the best candidate is the best of all that are not in the draft.
class Frontier {
  public:
    bool empty() const { return size_ == 0; }
    void push(const Candidate& candidate) {
        heap_[size_++] = candidate;
        std::push_heap(heap_.begin(), heap_.begin() + static_cast<std::ptrdiff_t>(size_));
    }
    Candidate pop() {
        std::pop_heap(heap_.begin(), heap_.begin() + static_cast<std::ptrdiff_t>(size_));
        return heap_[--size_];
    }

  private:
    std::array<Candidate, Draft::kMaxTokens + 2> heap_;
    size_t size_ = 0;
};

}  // namespace

Walks Drafter::best_walks(Request& request) const {
    const Texts texts = request.texts();
    Cursor* const cursors = request.cursors.data();  // in any order
    if (request.num_cursors > Walks::kMost) {
        std::nth_element(cursors, cursors + Walks::kMost, cursors + request.num_cursors,
                         [](const Cursor& a, const Cursor& b) { return a.score > b.score; });
    }
    Walks walks;
    walks.count = std::min(request.num_cursors, Walks::kMost);
    for (size_t i = 0; i < walks.count; ++i) walks.of[i] = cursors[i].walk(texts);
    return walks;
}

// Predicts what follows a place. Returns false if nothing is known about it, or if the best candidate cannot be drafted.
bool Drafter::expand(const Texts& texts, const Place& place, size_t choices, Prediction& prediction) const {
    prediction.num_learnt = prediction.num_choices = 0;
    const ContextHashes hashes(place.tail.data() + place.tail.size(), place.known);
    if (policy_.common) common_.prefetch(hashes);
    Evidence evidence;
    ask_texts(place.walks, evidence);
    ask_prompt(texts, hashes, evidence);
    if (policy_.common) ask_all_prompts(common_, hashes, evidence);
    if (evidence.num_candidates == 0) return false;
    mixer_.mix(evidence, place.bins, choices, prediction);
    uint8_t usable = 0;
    while (usable < prediction.num_choices && prediction.tokens[usable] < policy_.vocab_size) ++usable;
    prediction.num_choices = usable;
    if (usable == 0) prediction.num_learnt = 0;
    return usable > 0;
}

// Drafts at most `most` tokens, `depth` in a row.
void Drafter::predict(Request& request, Span<Token> context, int depth, int most) {
    const Texts texts = request.texts();
    Draft& draft = request.draft();
    // Tokens that are worth far less than those that were verified last would be dropped, so they are not predicted.
    const double weight = std::max(1.0f, request.weight);
    const auto floor = static_cast<float>(std::max(policy_.min_acceptance, least_worth_ / weight));
    const bool branches = num_calls_ >= next_branching_ && policy_.trees;
    Place place;
    place.walks = best_walks(request);
    const size_t known = std::min(context.size(), LogBilinear::kContext);
    for (const Token* token = context.end() - known; token != context.end(); ++token) place.append(*token);
    Place root;
    if (branches) root = place;

    const int longest = std::min(depth, most);
    draft.has_predictions = true;
    float likelihood = 1.0f;
    for (int last = Draft::kRoot;; ++last) {  // token in the draft
        Prediction& prediction = draft.after(last);
        if (!expand(texts, place, branches ? Prediction::kChoices : 1, prediction)) break;
        likelihood *= prediction.probability();
        if (last + 1 == longest || likelihood < floor) break;
        draft.add(prediction.token(), last, likelihood);
        place.advance(prediction.token(), policy_.rejoin);
    }
    draft.trunk = draft.size;
    if (branches) branch(texts, draft, root, depth, most, std::max(floor, static_cast<float>(least_branch_ / weight)));
}

// Adds the most likely tokens beside the trunk, up to `most` in all, `depth` in a row, that have at least this likelihood.
void Drafter::branch(const Texts& texts, Draft& draft, const Place& root, int depth, int most, float floor) const {
    std::array<Place, Draft::kMaxTokens + 1> places;  // [i + 1]: after token i
    std::array<int16_t, Draft::kMaxTokens + 1> depths;
    Frontier frontier;
    const auto add_next = [&](int parent, int rank) {
        const Prediction& prediction = draft.after(parent);
        if (rank >= prediction.num_choices || depths[static_cast<size_t>(parent + 1)] >= depth) return;
        const float likelihood = draft.likelihood(parent) * prediction.probabilities[static_cast<size_t>(rank)];
        if (likelihood >= floor) {
            frontier.push({likelihood, static_cast<int16_t>(parent), static_cast<int16_t>(rank)});
        }
    };
    const auto step = [&](int parent, int child, Token token) {
        places[static_cast<size_t>(child + 1)] = places[static_cast<size_t>(parent + 1)];
        places[static_cast<size_t>(child + 1)].advance(token, policy_.rejoin);
        depths[static_cast<size_t>(child + 1)] = static_cast<int16_t>(depths[static_cast<size_t>(parent + 1)] + 1);
    };
    places[0] = root;
    depths[0] = 0;
    for (int i = 0; i < draft.trunk; ++i) step(i - 1, i, draft.tokens[static_cast<size_t>(i)]);
    for (int i = Draft::kRoot; i < draft.trunk; ++i) add_next(i, 1);
    while (draft.size < most && !frontier.empty()) {
        const Candidate best = frontier.pop();
        const Token token = draft.after(best.parent).tokens[static_cast<size_t>(best.rank)];
        const int added = draft.size;
        draft.add(token, best.parent, best.likelihood);
        add_next(best.parent, best.rank + 1);
        step(best.parent, added, token);
        if (expand(texts, places[static_cast<size_t>(added + 1)], Prediction::kChoices, draft.after(added))) {
            add_next(added, 0);
        }
    }
}

}  // namespace rhyme
