// What is the chance that a drafted token is accepted? Learnt online from verified drafts.
//
// A drafted token is described by how well the best past answer that proposes it has agreed so far, and by the share
// of the vote it got. Each combination keeps a forgetting count of tokens verified and accepted, started from a prior,
// so estimates follow the policy as it trains. Not thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace rhyme {

class AcceptanceTable {
  public:
    using Cell = uint8_t;
    static constexpr int kScoreLevels = 8;
    static constexpr int kShareLevels = 8;

    AcceptanceTable() {
        for (int score = 0; score < kScoreLevels; ++score) {
            for (int share = 0; share < kShareLevels; ++share) {
                const float agreed = (static_cast<float>(share) + 0.5f) / kShareLevels;
                const float trust = 0.5f + 0.5f * static_cast<float>(score) / kScoreLevels;
                counts_[static_cast<size_t>(score * kShareLevels + share)] = {kPriorTokens, kPriorTokens * agreed * trust};
            }
        }
    }

    // score: tokens of recent agreement (see Cursor); share: of the vote, in [0, 1].
    static Cell cell(float score, float share) {
        int level = 0;
        for (float edge = 1.0f; level + 1 < kScoreLevels && score >= edge; edge *= 2.0f) ++level;
        const int column = std::min(kShareLevels - 1, static_cast<int>(share * kShareLevels));
        return static_cast<Cell>(level * kShareLevels + column);
    }

    float probability(Cell cell) const { return counts_[cell].accepted / counts_[cell].verified; }

    void learn(Cell cell, bool accepted) {
        Count& count = counts_[cell];
        count.verified += 1.0f;
        count.accepted += accepted ? 1.0f : 0.0f;
        if (count.verified > kMemoryTokens) {
            count.verified *= 0.5f;
            count.accepted *= 0.5f;
        }
    }

  private:
    static constexpr float kPriorTokens = 8.0f;
    static constexpr float kMemoryTokens = 2048.0f;

    struct Count {
        float verified;
        float accepted;
    };

    std::array<Count, kScoreLevels * kShareLevels> counts_;
};

}  // namespace rhyme
