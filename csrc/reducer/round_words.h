// What the ranks tell each other besides gradients: before the first bucket of a round, after the
// last, and between rounds (see Note [Votes] in reducer.h).

#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pydist {

// Before the first bucket, so that whoever needs the others' shares has them when it averages.
struct Opening {
  // What this rank is about to do. Only kRound begins a round.
  enum class Purpose { kRound, kStep, kRefuseStep, kLeaveJoin };
  Purpose purpose = Purpose::kRound;
  // The number of the sharded optimizer in whose step() this rank is; 0: it is in none.
  int stepping = 0;
  bool is_present = true;  // not joined: it has a batch of its own
  // How this rank's gradients count. All ranks that have gradients must say the same, or the round
  // fails.
  enum class Mode { kNothing, kAsOne, kByShare, kMixed };
  Mode mode = Mode::kAsOne;
  // This rank's part in the divisor.
  double share = 1.0;
  // That part is a number on the device; see Note [Weights on the device].
  bool has_share_on_device = false;
  // A digest of the parameters and the plan, which must be the same on all ranks.
  std::uint64_t digest = 0;
  std::size_t slots = 0;
  std::size_t forwards = 0;  // since the last round
  bool is_bare = false;      // no gradients: all parameters are frozen at the time
  // For kStep: a digest of the options of the step. Should be the same on all ranks.
  std::uint64_t options = 0;
  // A digest of the buffers that the program changed between rounds; 0 if it changed none. Should
  // be the same on all ranks.
  std::uint64_t changed_buffers = 0;
  std::size_t first_changed_buffer = 0;  // by number, from 1; 0: none
};

// After the last bucket.
struct Closing {
  // kGivenUp: of a round that was held, see Note [Held rounds].
  enum class Status { kFine, kThrew, kHookThrew, kGivenUp };
  Status status = Status::kFine;
  bool wants_buffers = false;  // has changed its buffers
  bool wants_plan = false;     // has another plan to offer; rank 0 only
  bool is_captured = false;    // into a CUDA graph
};

// The openings of all ranks, as a buffer for an all_gather in place.
class Openings {
 public:
  Openings(int rank, int size);

  void write(const Opening& own);
  [[nodiscard]] Opening of(int rank) const;
  [[nodiscard]] double total_share() const;
  [[nodiscard]] int present() const;          // how many
  [[nodiscard]] int highest_present() const;  // -1: none
  [[nodiscard]] std::vector<int> ranks_with(Opening::Purpose purpose) const;
  // The number, from 1, of the first buffer that some ranks changed and others did not, or to other
  // values; 0: there is none.
  [[nodiscard]] std::size_t first_differing_buffer() const;
  // The part of the buffer that is this rank's, and all of it.
  [[nodiscard]] const at::Tensor& own() const noexcept { return own_; }
  [[nodiscard]] const at::Tensor& all() const noexcept { return all_; }

 private:
  int size_;
  at::Tensor all_;
  at::Tensor own_;
};

// The closings of all ranks, and how many of them used each parameter (0: it was unused
// everywhere), as a buffer for a sum.
class Closings {
 public:
  Closings(int rank, int size, std::size_t slots);

  // Sets everything to zero, then this rank's words.
  void write(const Closing& own);
  void set_used(std::size_t slot) { words()[used_begin_ + slot] = 1.0; }
  void set_late(std::size_t slot) { words()[used_begin_ + slots_ + slot] = 1.0; }

  // After the sum.
  [[nodiscard]] Closing of(int rank) const;
  [[nodiscard]] bool any(bool Closing::* wish) const;
  [[nodiscard]] bool all(bool Closing::* wish) const;
  [[nodiscard]] int used(std::size_t slot) const;
  [[nodiscard]] bool is_late(std::size_t slot) const;

  [[nodiscard]] std::size_t slots() const noexcept { return slots_; }
  [[nodiscard]] const at::Tensor& memory() const noexcept { return memory_; }

 private:
  [[nodiscard]] double* words() const;

  int rank_;
  int size_;
  std::size_t slots_;
  std::size_t used_begin_;
  at::Tensor memory_;
};

}  // namespace pydist
