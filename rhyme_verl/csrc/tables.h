// Tables of slots that are addressed by a 32-bit hash: one of fixed size, and one that grows slot by slot.
//
// The growing one is a linear hash table (Litwin, 1980): each new slot takes over a part of one older slot, and nothing else
// moves, so growth never makes a step wait.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace rhyme {

template <typename T>
class FixedTable {
  public:
    FixedTable(size_t size, const T& first) : slots_(size, first) {}

    T& operator[](uint32_t hash) { return slots_[index_of(hash)]; }
    const T& operator[](uint32_t hash) const { return slots_[index_of(hash)]; }

    size_t size() const { return slots_.size(); }
    int64_t num_bytes() const { return static_cast<int64_t>(slots_.capacity() * sizeof(T)); }
    template <typename Visit>
    void for_each(Visit visit) const {
        for (const T& slot : slots_) visit(slot);
    }

  private:
    size_t index_of(uint32_t hash) const { return static_cast<size_t>((uint64_t{hash} * slots_.size()) >> 32); }

    std::vector<T> slots_;
};

template <typename T>
class GrowingTable {
  public:
    // `size`: slots at the beginning, a power of two from kMinSlots on.
    GrowingTable(size_t size, const T& first) : half_(size) {
        while (size_ < size) push_back(first);
    }

    T& operator[](uint32_t hash) { return slot(index_of(hash)); }
    const T& operator[](uint32_t hash) const { return slot(index_of(hash)); }

    // Adds a slot: `split(slot, bit)` removes from a slot what belongs to hashes with this bit, and returns it.
    template <typename Split>
    void grow(Split split) {
        const size_t from = size_ - half_;
        push_back(split(slot(from), hash_bit_of(half_)));
        if (size_ == 2 * half_) half_ = size_;
    }

    size_t size() const { return size_; }
    template <typename Visit>
    void for_each(Visit visit) const {
        for (size_t i = 0; i < size_; ++i) visit(slot(i));
    }

    static constexpr size_t kMinSlots = 64;  // addressed by the six highest bits of the hash

  private:
    static constexpr size_t kChunk = 64;

    // More slots are addressed by the bits from bit 1 on, of which ContextCounts keeps those up to bit 23.
    static size_t address_of(uint32_t hash) { return (hash >> 26) | ((hash & 0xFFFFFEu) << 5); }
    static uint32_t hash_bit_of(size_t address_bit) { return static_cast<uint32_t>(address_bit >> 5); }

    size_t index_of(uint32_t hash) const {
        const size_t index = address_of(hash) & (2 * half_ - 1);
        return index < size_ ? index : index - half_;
    }
    T& slot(size_t i) { return (*chunks_[i / kChunk])[i % kChunk]; }
    const T& slot(size_t i) const { return (*chunks_[i / kChunk])[i % kChunk]; }
    void push_back(const T& value) {
        if (size_ % kChunk == 0) chunks_.push_back(std::make_unique<std::array<T, kChunk>>());
        slot(size_++) = value;
    }

    std::vector<std::unique_ptr<std::array<T, kChunk>>> chunks_;
    size_t half_;  // half_ <= size_ < 2 * half_; the slots up to size_ - half_ have been split
    size_t size_ = 0;
};

}  // namespace rhyme
