// Who sends which chunk when, in a ring of p ranks. Pure arithmetic; no transport, no data.
//
// Every rank sends to rank+1 and receives from rank-1. The buffer is cut into p chunks, one a rank.
//
//   reduce-scatter  p-1 steps. In step s rank r sends chunk r-s-1 and receives chunk r-s-2, to
//                   which it adds its own; after the last step, rank r holds chunk r complete.
//   all-gather      p-1 steps. In step s rank r sends chunk r-s and receives chunk r-s-1.
//
// Each rank sends (p-1)/p of the buffer in each half: 2(p-1)/p for an all-reduce, whatever p.
// The contributions to chunk c are summed in the order c+1, c+2, ..., p-1, 0, ..., c.
// (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
// Journal of Parallel and Distributed Computing 69(2), 2009.)

#pragma once

namespace pydist {

class RingSchedule {
 public:
  RingSchedule(int rank, int size) noexcept : rank_(rank), size_(size) {}

  [[nodiscard]] int steps() const noexcept { return size_ - 1; }
  [[nodiscard]] int next() const noexcept { return wrap(rank_ + 1); }
  [[nodiscard]] int previous() const noexcept { return wrap(rank_ - 1); }

  [[nodiscard]] int reduce_scatter_sends(int step) const noexcept { return wrap(rank_ - step - 1); }
  [[nodiscard]] int reduce_scatter_receives(int step) const noexcept {
    return wrap(rank_ - step - 2);
  }
  [[nodiscard]] int all_gather_sends(int step) const noexcept { return wrap(rank_ - step); }
  [[nodiscard]] int all_gather_receives(int step) const noexcept { return wrap(rank_ - step - 1); }

 private:
  // For values from -2 * size_ up.
  [[nodiscard]] int wrap(int value) const noexcept { return (value + 2 * size_) % size_; }

  int rank_;
  int size_;
};

}  // namespace pydist
