// Random requests against random histories while another thread files answers; built with sanitizers by
// tools/sanitize.sh. Checks what must hold of every draft, too. Usage: fuzz DRAFT_CALLS SEED

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "drafter.h"
#include "history_index.h"

using namespace rhyme;

namespace {

constexpr int kVocabulary = 40;
constexpr int kForeign = 3;  // ids that a history may have and the model does not
constexpr Token kLargest = std::numeric_limits<Token>::max();
constexpr int kPrompts = 12;
constexpr int kRows = 12;
constexpr int kManyRows = 60;  // enough to be spread over threads
constexpr int kAnswerTokens = 300;
constexpr int kStepsPerDrafter = 250;

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "fuzz: %s\n", what);
    std::exit(1);
}

class Dice {
  public:
    explicit Dice(uint64_t seed) : engine_(seed) {}
    int below(int count) { return static_cast<int>(engine_() % static_cast<uint64_t>(count)); }
    bool one_in(int count) { return below(count) == 0; }
    double share() { return below(1 << 20) / static_cast<double>(1 << 20); }
    int one_of(std::initializer_list<int> values) { return values.begin()[below(static_cast<int>(values.size()))]; }
    std::vector<Token> text(int size, int vocabulary) {
        std::vector<Token> tokens(static_cast<size_t>(size));
        for (Token& token : tokens) token = below(vocabulary);
        return tokens;
    }

  private:
    std::mt19937_64 engine_;
};

struct World {  // what all answers to a prompt resemble
    std::vector<std::vector<Token>> prompts, truths;

    explicit World(Dice& dice) {
        for (int i = 0; i < kPrompts; ++i) {
            prompts.push_back(dice.text(dice.one_of({0, 1, 2, 5, 30}), kVocabulary));
            truths.push_back(dice.text(kAnswerTokens, kVocabulary));
        }
    }
};

void feed(HistoryIndex& index, const World& world, Dice& dice) {
    const size_t prompt = static_cast<size_t>(dice.below(kPrompts));
    std::vector<Token> tokens;
    std::vector<int32_t> lengths;
    std::vector<int64_t> steps;
    std::vector<uint64_t> ids;
    for (int i = dice.below(4); i > 0; --i) {
        const int length = dice.below(kAnswerTokens);
        for (int t = 0; t < length; ++t) {
            const bool changed = dice.one_in(20);
            const Token other = dice.one_in(9) ? dice.one_of({kLargest, (1 << 24) - 1, 1 << 24}) : dice.below(kVocabulary + kForeign);
            tokens.push_back(changed ? other : world.truths[prompt][static_cast<size_t>(t)]);
        }
        lengths.push_back(length);
        steps.push_back(dice.below(5));
        ids.push_back(static_cast<uint64_t>(dice.below(9)));
    }
    index.update(HistoryIndex::key_of(world.prompts[prompt]), {tokens, lengths, steps, ids});
}

struct Request {
    int slot = -1;
    size_t which = 0;
    std::vector<Token> context;
};

// The request's next tokens: what the model would have said, up to the first drafted token that it would not.
void answer(Request& request, Span<Token> draft, const World& world, Dice& dice) {
    const std::vector<Token>& truth = world.truths[request.which];
    for (size_t i = 0;; ++i) {
        const size_t at = request.context.size() - std::min(request.context.size(), world.prompts[request.which].size());
        const Token said = at < truth.size() && !dice.one_in(20) ? truth[at] : dice.below(kVocabulary);
        request.context.push_back(said);
        if (i >= draft.size() || draft[i] != said) return;
    }
}

// An engine step: synchronous, or asynchronous with drafts, in which learning may come late, or only considered. Returns the
// rows that the next step has.
std::vector<Drafter::Row> step(Drafter& drafter, const std::vector<Drafter::Row>& rows, StepBound bound, double now, Dice& dice) {
    const int step_tokens = dice.one_of({StepAccount::kAsBegun, 0, 20, 300});
    Drafter::Arrival arrival{bound, now, step_tokens, rows};
    switch (dice.below(3)) {
        case 0:
            drafter.draft(arrival);
            break;
        case 1:
            while (!arrival.rows.empty() && dice.one_in(6)) {
                arrival.leaving.push_back(arrival.rows.back());
                arrival.rows.pop_back();
            }
            drafter.draft_first(arrival);
            drafter.launched(now);
            if (dice.one_in(4)) break;
            drafter.learn(arrival.rows);
            drafter.learn(arrival.leaving);
            break;
        default:
            drafter.wants_undrafted(static_cast<int>(rows.size()));
            drafter.consider(arrival, dice.one_in(3));
    }
    return arrival.rows;
}

void check(const HistoryIndex& index, const Drafter& drafter) {
    if (const char* problem = index.check_integrity(); *problem) fail(problem);
    if (const char* problem = drafter.check_integrity(); *problem) fail(problem);
}

int run_one(const World& world, Dice& dice) {
    const HistoryLimits limits{dice.one_of({1, 3}), dice.one_of({8, 64, 4096}), dice.one_of({1, 2000, 1 << 20})};
    DraftPolicy policy;
    policy.cost_aware = dice.one_in(2);
    policy.max_draft_tokens = dice.one_of({1, 4, 24, 127});
    policy.num_threads = dice.one_in(10) ? 3 : 1;
    policy.vocab_size = kVocabulary;
    policy.min_acceptance = dice.one_of({0, 15, 50}) / 100.0;
    policy.max_live_tokens = dice.one_of({0, 50, 5000});
    policy.siblings = !dice.one_in(3);
    policy.common = !dice.one_in(5);
    policy.rejoin = !dice.one_in(5);
    auto index = std::make_shared<HistoryIndex>(limits);
    Drafter drafter(index, policy);

    std::atomic<bool> done{false};
    const uint64_t feed_seed = static_cast<uint64_t>(dice.below(1 << 30));
    std::thread feeder([&] {
        Dice own(feed_seed);
        while (!done) feed(*index, world, own);
    });
    std::vector<Request> requests(policy.num_threads > 1 ? kManyRows : kRows);
    double clock = 0.0;
    int calls = 0;
    for (; calls < kStepsPerDrafter; ++calls) {
        std::vector<Drafter::Row> rows;
        const int room = dice.one_of({0, 50, 1 << 30});
        for (Request& request : requests) {
            if (request.slot < 0 && dice.one_in(3)) {
                request.which = static_cast<size_t>(dice.below(kPrompts));
                request.context = world.prompts[request.which];
                const std::vector<Token>& truth = world.truths[request.which];
                if (dice.one_in(3)) request.context.insert(request.context.end(), truth.begin(), truth.begin() + dice.below(20));
                const bool resumed = dice.one_in(2);
                const std::vector<Token> start = resumed ? request.context : world.prompts[request.which];
                request.slot = drafter.open(start, dice.one_of({0, 5, 1 << 30}));
            } else if (request.slot >= 0 && (dice.one_in(50) || request.context.size() > 450)) {
                drafter.close(request.slot);
                request.slot = -1;
            } else if (request.slot >= 0) {
                answer(request, drafter.draft_of(request.slot), world, dice);
                if (dice.one_in(50)) request.context.resize(request.context.size() - std::min<size_t>(3, request.context.size()));
            }
        }
        for (Request& request : requests) {
            if (request.slot >= 0 && !dice.one_in(100)) rows.push_back({request.slot, request.context, room});
        }
        const StepBound bound{dice.one_of({0, 6, 20, 100, 1 << 30}), dice.one_of({0, 1, 6, 100, 1 << 30})};
        clock += dice.one_of({0, 1, 10, 5000, -1000}) / 1000.0;
        rows = step(drafter, rows, bound, clock, dice);
        if (dice.one_in(25)) check(*index, drafter);
        int64_t drafted = 0, longest = 0;
        for (const Drafter::Row& row : rows) {
            const Span<Token> draft = drafter.draft_of(row.slot);
            drafted += static_cast<int64_t>(draft.size());
            longest = std::max<int64_t>(longest, static_cast<int64_t>(draft.size()));
            for (Token token : draft) {
                if (token < 0 || token >= kVocabulary) fail("a draft has an id outside the vocabulary");
            }
            if (static_cast<int>(draft.size()) > std::min(room, policy.max_draft_tokens)) fail("a draft is too long");
        }
        const int64_t num_rows = static_cast<int64_t>(rows.size());
        if (drafted && num_rows + drafted > bound.max_tokens) fail("a step has more tokens than its bound");
        if (drafted && bound.pads_rows() && num_rows * (longest + 1) > bound.max_sampled) fail("a step samples too many rows");
    }
    done = true;
    feeder.join();
    check(*index, drafter);
    drafter.stats();
    index->stats();
    return calls;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) fail("usage: fuzz DRAFT_CALLS SEED");
    const long wanted = std::atol(argv[1]);
    Dice dice(std::strtoull(argv[2], nullptr, 10));
    long calls = 0;
    while (calls < wanted) calls += run_one(World(dice), dice);
    std::printf("%ld draft calls, seed %s: no findings\n", calls, argv[2]);
}
