// A view of contiguous values: the subset of C++20's std::span that is used here. It does not own the values, so it is
// valid only as long as they are neither freed nor moved; appending to the vector that a Span views may do both.
#pragma once

#include <cstddef>
#include <vector>

namespace rhyme {

template <typename T>
class Span {
  public:
    Span() = default;
    Span(const T* data, size_t size) : data_(data), size_(size) {}
    Span(const std::vector<T>& values) : data_(values.data()), size_(values.size()) {}

    const T* begin() const { return data_; }
    const T* end() const { return data_ + size_; }
    size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }
    const T& operator[](size_t i) const { return data_[i]; }
    Span first(size_t count) const { return {data_, count}; }
    Span subspan(size_t offset) const { return {data_ + offset, size_ - offset}; }

  private:
    const T* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace rhyme
