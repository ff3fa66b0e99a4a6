#include "c10d/sparse/row_sum.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "c10d/tensors.h"
#include "kernels/cpu/reduce.h"

namespace pydist {
namespace {

// The rows of a summand that are still to be merged.
struct Rest {
  std::size_t summand;
  const std::int64_t* index;  // of the next row
  const std::byte* value;
  std::int64_t rows;
};

class Merge {
 public:
  explicit Merge(const std::vector<SparseRows>& summands)
      : dimensions_(summands[0].indices.size(1)),
        addition_{*dtype_of(summands[0].values.scalar_type()), ReduceOp::kSum} {
    std::int64_t most = 0;
    for (const SparseRows& each : summands) {
      most += each.indices.size(0);
    }
    const at::Tensor& like = summands[0].values;
    std::vector<std::int64_t> shape = like.sizes().vec();
    shape[0] = most;
    sum_ = {at::empty({most, dimensions_}, summands[0].indices.options()),
            at::empty(shape, like.options())};
    width_ = most == 0
                 ? 0
                 : static_cast<std::size_t>(sum_.values.numel()) / static_cast<std::size_t>(most);
    row_bytes_ = width_ * like.itemsize();
    index_bytes_ = static_cast<std::size_t>(dimensions_) * sizeof(std::int64_t);
    index_ = sum_.indices.mutable_data_ptr<std::int64_t>();
    value_ = static_cast<std::byte*>(sum_.values.mutable_data_ptr());
    for (std::size_t i = 0; i < summands.size(); ++i) {
      if (summands[i].indices.size(0) != 0) {
        rests_.push_back({i, summands[i].indices.const_data_ptr<std::int64_t>(),
                          static_cast<const std::byte*>(summands[i].values.const_data_ptr()),
                          summands[i].indices.size(0)});
      }
    }
  }

  SparseRows run() {
    merge_many();
    merge_two();
    for (Rest& last : rests_) {
      take(last, last.rows);
    }
    return {sum_.indices.narrow(0, 0, rows_), sum_.values.narrow(0, 0, rows_)};
  }

 private:
  // Negative, 0 or positive, as the next row of `one` comes before, with or behind that of `other`.
  [[nodiscard]] int order(const Rest& one, const Rest& other) const noexcept {
    for (std::int64_t dimension = 0; dimension < dimensions_; ++dimension) {
      if (one.index[dimension] != other.index[dimension]) {
        return one.index[dimension] < other.index[dimension] ? -1 : 1;
      }
    }
    return 0;
  }

  // While there are more than two: a heap has the next row on top, and of equal ones that of the
  // first summand.
  void merge_many() {
    const auto is_behind = [this](const Rest& one, const Rest& other) {
      const int place = order(one, other);
      return place != 0 ? place > 0 : one.summand > other.summand;
    };
    if (rests_.size() > 2) {
      std::make_heap(rests_.begin(), rests_.end(), is_behind);
    }
    std::vector<const void*> alike;  // the values of the row that is being made
    while (rests_.size() > 2) {
      std::memcpy(index_, rests_.front().index, index_bytes_);
      alike.clear();
      while (!rests_.empty() && std::memcmp(rests_.front().index, index_, index_bytes_) == 0) {
        std::pop_heap(rests_.begin(), rests_.end(), is_behind);
        alike.push_back(rests_.back().value);
        pass(rests_.back(), 1);
        if (rests_.back().rows == 0) {
          rests_.pop_back();
        } else {
          std::push_heap(rests_.begin(), rests_.end(), is_behind);
        }
      }
      if (alike.size() == 1) {
        std::memcpy(value_, alike[0], row_bytes_);
      } else {
        add(alike);
      }
      advance(1);
    }
  }

  void merge_two() {
    if (rests_.size() != 2) {
      return;
    }
    if (rests_[0].summand > rests_[1].summand) {
      std::swap(rests_[0], rests_[1]);
    }
    Rest& one = rests_[0];
    Rest& other = rests_[1];
    std::vector<const void*> both(2);
    while (one.rows != 0 && other.rows != 0) {
      const int place = order(one, other);
      if (place != 0) {
        take(place < 0 ? one : other, 1);
        continue;
      }
      std::memcpy(index_, one.index, index_bytes_);
      both = {one.value, other.value};
      add(both);
      pass(one, 1);
      pass(other, 1);
      advance(1);
    }
  }

  // The next rows of the sum are these.
  void take(Rest& rest, std::int64_t rows) {
    std::memcpy(index_, rest.index, static_cast<std::size_t>(rows) * index_bytes_);
    std::memcpy(value_, rest.value, static_cast<std::size_t>(rows) * row_bytes_);
    pass(rest, rows);
    advance(rows);
  }
  // The values of the next row are the sums of these.
  void add(const std::vector<const void*>& alike) {
    if (width_ != 0) {
      void* const target = value_;
      reduce(addition_, alike, {&target, 1}, width_);
    }
  }
  void pass(Rest& rest, std::int64_t rows) const noexcept {
    rest.index += rows * dimensions_;
    rest.value += static_cast<std::size_t>(rows) * row_bytes_;
    rest.rows -= rows;
  }
  void advance(std::int64_t rows) noexcept {
    index_ += rows * dimensions_;
    value_ += static_cast<std::size_t>(rows) * row_bytes_;
    rows_ += rows;
  }

  const std::int64_t dimensions_;
  const Reduction addition_;
  std::size_t width_ = 0;  // elements of a row
  std::size_t row_bytes_ = 0;
  std::size_t index_bytes_ = 0;
  std::vector<Rest> rests_;
  SparseRows sum_;                 // with room for all rows
  std::int64_t* index_ = nullptr;  // of the next row of the sum
  std::byte* value_ = nullptr;
  std::int64_t rows_ = 0;
};

}  // namespace

SparseRows sum_of_rows(const std::vector<SparseRows>& summands) { return Merge(summands).run(); }

}  // namespace pydist
