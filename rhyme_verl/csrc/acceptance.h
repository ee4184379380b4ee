// What is the chance that a drafted token is accepted? Learnt online from what the model said.
//
// A drafted token is described by how well the best text that proposes it has agreed so far, the share of the vote it
// got, and whether common phrases say the same; one that only a phrase proposes, by that phrase's record. Each
// combination (cell) keeps a forgetting count of tokens proposed and right, started from a prior, so estimates follow
// the policy as it trains. Not thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "phrase_table.h"

namespace rhyme {

class AcceptanceTable {
  public:
    using Cell = uint16_t;

    AcceptanceTable() {
        for (int score = 0; score < kScoreLevels; ++score) {
            for (int share = 0; share < kShareLevels; ++share) {
                const float agreed = (static_cast<float>(share) + 0.5f) / kShareLevels;
                const float trust = 0.5f + 0.5f * static_cast<float>(score) / kScoreLevels;
                for (int phrase = 0; phrase < kOpinions; ++phrase) {
                    counts_[index(score, share, phrase)] = {kPriorTokens, kPriorTokens * agreed * trust};
                }
            }
        }
        for (size_t i = kPhraseCells; i < counts_.size(); ++i) counts_[i] = {kPriorTokens, kPriorTokens * 0.25f};
    }

    // What a phrase says of a token proposed by a text: 0 nothing, else by its order, record, and whether it agrees.
    static int opinion(int order, int hits, bool agrees) { return 1 + 4 * order + 2 * (hits >= kStrongHits) + agrees; }

    // score: tokens of recent agreement (see Cursor); share: of the vote, in [0, 1].
    static Cell cell(float score, float share, int opinion) {
        const int column = std::min(kShareLevels - 1, static_cast<int>(share * kShareLevels));
        return static_cast<Cell>(index(level_of(score), column, opinion));
    }

    static Cell phrase_cell(int order, int hits) {
        return static_cast<Cell>(kPhraseCells + order * kScoreLevels + level_of(static_cast<float>(hits)));
    }

    float probability(Cell cell) const { return counts_[cell].right / counts_[cell].proposed; }

    void learn(Cell cell, bool right) {
        Count& count = counts_[cell];
        count.proposed += 1.0f;
        count.right += right ? 1.0f : 0.0f;
        if (count.proposed > kMemoryTokens) {
            count.proposed *= 0.5f;
            count.right *= 0.5f;
        }
    }

  private:
    static constexpr int kScoreLevels = 8;
    static constexpr int kShareLevels = 10;
    static constexpr int kOrders = static_cast<int>(PhraseTable::kOrders.size());
    static constexpr int kOpinions = 1 + 4 * kOrders;
    static constexpr int kStrongHits = 4;
    static constexpr int kPhraseCells = kScoreLevels * kShareLevels * kOpinions;
    static constexpr float kPriorTokens = 8.0f;
    static constexpr float kMemoryTokens = 4096.0f;

    struct Count {
        float proposed;
        float right;
    };

    static int level_of(float value) {  // octaves
        int level = 0;
        for (float edge = 1.0f; level + 1 < kScoreLevels && value >= edge; edge *= 2.0f) ++level;
        return level;
    }
    static size_t index(int score, int share, int phrase) {
        return static_cast<size_t>((score * kShareLevels + share) * kOpinions + phrase);
    }

    std::array<Count, kPhraseCells + kOrders * kScoreLevels> counts_;
};

}  // namespace rhyme
