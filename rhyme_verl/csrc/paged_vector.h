// Vectors whose large arrays go back to the system as soon as they are freed.
//
// Histories are rebuilt at another size in every epoch. In the heap they leave holes between what lives longer, and the
// process keeps those: up to a third more memory than the histories have.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <new>
#include <vector>

namespace rhyme {

// Each array follows a header, which says whether it has pages of its own.
class PagedBlocks {
  public:
    static constexpr size_t kHeader = 64;  // keeps cache lines aligned

    static void* allocate(size_t num_bytes) {
        num_bytes += kHeader;
        Header* header = num_bytes >= kLeastMapped ? map(num_bytes) : nullptr;
        if (!header) header = new (::operator new(num_bytes, kAlignment)) Header{0};
        return reinterpret_cast<std::byte*>(header) + kHeader;
    }

    static void free(void* array) {
        auto* header = reinterpret_cast<Header*>(static_cast<std::byte*>(array) - kHeader);
        if (header->mapped_bytes == 0) return ::operator delete(header, kAlignment);
        munmap(header, header->mapped_bytes);
        --num_mapped_;
    }

  private:
    static constexpr size_t kLeastMapped = 128 << 10;  // bytes, as in a heap that has freed nothing yet
    static constexpr int kMostMapped = 1 << 14;  // a quarter of what Linux allows a process by default
    static constexpr std::align_val_t kAlignment{kHeader};

    struct Header {
        size_t mapped_bytes;  // 0 in the heap
    };

    static Header* map(size_t num_bytes) {  // null if there is no page or no mapping left
        int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_POPULATE
        flags |= MAP_POPULATE;  // every page is written soon
#endif
        if (++num_mapped_ <= kMostMapped) {
            void* pages = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
            if (pages != MAP_FAILED) return new (pages) Header{num_bytes};
        }
        --num_mapped_;
        return nullptr;
    }

    static inline std::atomic<int> num_mapped_{0};
};

template <typename T>
struct PagedAllocator {
    static_assert(alignof(T) <= PagedBlocks::kHeader);
    using value_type = T;

    PagedAllocator() = default;
    template <typename U>
    PagedAllocator(const PagedAllocator<U>&) {}

    T* allocate(size_t count) { return static_cast<T*>(PagedBlocks::allocate(count * sizeof(T))); }
    void deallocate(T* array, size_t) { PagedBlocks::free(array); }

    friend bool operator==(PagedAllocator, PagedAllocator) { return true; }
};

template <typename T>
using PagedVector = std::vector<T, PagedAllocator<T>>;

}  // namespace rhyme
