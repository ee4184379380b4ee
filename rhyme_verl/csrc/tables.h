// Tables of slots that are addressed by a 32-bit hash: one of fixed size, and one that grows slot by slot.
//
// The growing one is a linear hash table (Litwin, 1980): each new slot takes over a part of one older slot, and nothing else
// moves, so growth never makes a step wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

#include "paged_vector.h"

namespace rhyme {

template <typename T>
class FixedTable {
  public:
    FixedTable(size_t size, const T& first) : slots_(size, first) {}

    T& operator[](uint32_t hash) { return slots_[index_of(hash)]; }
    const T& operator[](uint32_t hash) const { return slots_[index_of(hash)]; }

    const PagedVector<T>& slots() const { return slots_; }
    int64_t num_bytes() const { return static_cast<int64_t>(slots_.capacity() * sizeof(T)); }

  private:
    size_t index_of(uint32_t hash) const { return static_cast<size_t>((uint64_t{hash} * slots_.size()) >> 32); }

    PagedVector<T> slots_;
};

template <typename T>
class GrowingTable {
  public:
    // `size`: slots at the beginning, a power of two from 64 on.
    GrowingTable(size_t size, const T& first) : slots_(size, first), half_(size) {}

    T& operator[](uint32_t hash) { return slots_[index_of(hash)]; }
    const T& operator[](uint32_t hash) const { return slots_[index_of(hash)]; }

    // Adds a slot: `split(slot, bit)` removes from a slot what belongs to hashes with this bit, and returns it.
    template <typename Split>
    void grow(Split split) {
        slots_.push_back(split(slots_[slots_.size() - half_], hash_bit_of(half_)));
        if (slots_.size() == 2 * half_) half_ = slots_.size();
    }

    const std::deque<T>& slots() const { return slots_; }

  private:
    // The first 64 slots are addressed by the six highest bits of the hash. More slots are addressed by the bits from bit 1
    // on, of which ContextCounts keeps those up to bit 23.
    static size_t address_of(uint32_t hash) { return (hash >> 26) | ((hash & 0xFFFFFEu) << 5); }
    static uint32_t hash_bit_of(size_t address_bit) { return static_cast<uint32_t>(address_bit >> 5); }

    size_t index_of(uint32_t hash) const {
        const size_t index = address_of(hash) & (2 * half_ - 1);
        return index < slots_.size() ? index : index - half_;
    }

    std::deque<T> slots_;  // which appending does not move
    size_t half_;  // half_ <= slots_.size() < 2 * half_; the slots up to slots_.size() - half_ have been split
};

}  // namespace rhyme
