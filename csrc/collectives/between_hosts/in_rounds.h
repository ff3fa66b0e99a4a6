// all_reduce in rounds, for what is too long to be sent to all and too short to be worth a message
// from each rank to each: 2 log2(p) messages of each rank, half of which announce it as well.
//
// The buffer is divided into a slice for each rank. What the ranks contribute to a slice goes to
// its owner as in an all-to-all in rounds (topology/rounds.h), and the results as in an all-gather
// in rounds. On the way contributions stay apart, so that the owner combines them in rank order,
// and the result is the same bit by bit as in a direct exchange. That costs bytes: each rank sends
// log2(p)/2 s, and then (p-1)/p s, where recursive halving and doubling (Thakur, Rabenseifner and
// Gropp, 2005), which adds on the way, sends 2(p-1)/p s.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "collectives/between_hosts/announcing.h"
#include "collectives/collective_steps.h"
#include "collectives/slices.h"
#include "collectives/task.h"
#include "topology/rounds.h"

namespace pydist {

// Whether this call, which is not sent whole, is one for it: of so many bytes at most, in messages
// that fit a transit slot. The same on every rank.
[[nodiscard]] bool goes_in_rounds(const Collective& run, std::size_t most_bytes) noexcept;

// Its contributions ride with the posts. Each rank is on a host of its own.
class AllReduceInRounds final : public Rider {
 public:
  explicit AllReduceInRounds(Collective& run);

  [[nodiscard]] std::span<const std::byte> message(int round) override;
  void take(int round) override;
  // All that is left to do once all have posted, and agree.
  [[nodiscard]] Task finish();

 private:
  [[nodiscard]] std::size_t count(int rank) const { return slices_[rank].count; }
  [[nodiscard]] std::byte* of_slice(std::byte* buffer, int rank) const {
    return buffer + run_.bytes(slices_[rank].begin);
  }
  // To whom goes what has `places` to go in all and is, in a round, at the rank `holder` places
  // after this one.
  [[nodiscard]] int owner(int round, int holder, int places) const {
    return rounds_.before(places - Rounds::done(places, round) - holder);
  }
  // What a rank has sent, which must be so many bytes.
  [[nodiscard]] const std::byte* arrived(int from, std::uint64_t transit_round,
                                         std::size_t bytes) const;
  // Adds elements to the message: of a buffer of this rank, or as they have travelled.
  void append(const std::byte* own, const std::byte* travelled, std::size_t count);
  [[nodiscard]] Task spread_results(const std::byte* own_result);

  Collective& run_;
  const Rounds rounds_;
  const Slices slices_;
  std::byte* const input_;
  std::byte* const output_;
  std::vector<std::byte> message_;
  // What is here of contributions that go so many places in all, as it has travelled; null where
  // this rank contributes it itself. In the end, those of the ranks so many places after this one.
  std::vector<const std::byte*> contributions_;
};

}  // namespace pydist
