// Chooses how the collectives of a group move their data, by the times that they take.
//
// Note [Who chooses]
// One rank of an operation chooses for all: its root, or rank 0 where the kind has none. Nothing
// that is chosen changes a result: elements are combined in rank order one by one, whatever the
// pieces are. The choice travels in that rank's post (TuningWord), in two ways:
//   - Pieces and stores matter only once all posts have been seen (of a one-to-all kind: the
//     root's). So they are those of the very operation.
//   - Whether a rank gives its data ahead, in one shot, in pieces, or lets others read it in place,
//     it decides before it sees any post. So the post says how it will be in the next operation of
//     the same kind, class and root: every rank has seen this post when it begins that one, since
//     it runs the operations one by one. Ranks whose blocks or memories differ may be of different
//     classes and decide each by itself: then all take one way (agreed_route()), and nothing is
//     measured unless it is the one that was to be.
//
// Measured is the time from when all have posted to the end, on the rank that chooses, and what it
// takes that rank before to give its data ahead: so nobody's being late counts. In the kinds with a
// root, the root is the last one to be through; of one-to-all kinds see OperationTime.
//
// Owned with the group; used with the right to drive it.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "collectives/call.h"
#include "collectives/group_segment.h"
#include "collectives/shared_memory/route.h"
#include "collectives/shared_memory/tuning_candidates.h"
#include "collectives/wire.h"
#include "tuning/candidate_chooser.h"
#include "tuning/tuning_table.h"

namespace pydist {

class Tuning {
 public:
  Tuning(int rank, int ranks, const TuningLimits& limits, const TuningRhythm& rhythm,
         TuningTable& table);

  // -- every rank ---------------------------------------------------------------------------
  // How this rank gives so many bytes: kEager, kInPieces, kShared or kInItsProcess, and as is
  // `usual` where nothing has been agreed. Allocates nothing for a class that no word has named
  // yet.
  [[nodiscard]] Offer agreed_way(const Call& call, TunedMemory memory, std::size_t bytes,
                                 Offer usual) const noexcept {
    return is_tuned(bytes) ? heard_way(call, memory, bytes).value_or(usual) : usual;
  }
  // Whether a word of the rank that chooses makes sense.
  [[nodiscard]] bool is_sound(const Call& call, const TuningWord& word) const noexcept;
  // Takes note of the word that the chooser has posted.
  void hear(const Call& call, const TuningWord& word);

  // -- the rank that chooses ----------------------------------------------------------------
  [[nodiscard]] bool chooses(const Call& call) const noexcept { return rank_ == call.root; }
  // Begins an operation on data in `memory`. The word for the post, if there is something to say.
  [[nodiscard]] std::optional<TuningWord> begin(const Call& call, TunedMemory memory) {
    running_ = nullptr;
    const std::size_t bytes = tuned_bytes(call);
    return is_tuned(bytes) ? choose(call, memory, bytes) : std::nullopt;
  }
  // This rank has given ahead what it gives ahead.
  void note_given() {
    if (running_ != nullptr && plan_.is_timed) {
      given_in_ = std::chrono::steady_clock::now() - begun_;
    }
  }
  // Whether the time of the operation that has begun is asked for, if it takes `route`.
  [[nodiscard]] bool is_timed(Route route) const noexcept;
  // `time`: since all have posted.
  void note(std::chrono::nanoseconds time);

 private:
  struct Class {
    TuningKey key;
    std::optional<Offer> way;  // as heard; without a value as usual
    // On the rank that chooses, from its first operation on:
    bool is_known = false;
    std::vector<Choice> choices;
    bool has_ways = false;                    // the choices differ in how data is given
    std::optional<CandidateChooser> chooser;  // where there is a choice
    bool has_stores = false;                  // the choices differ in their stores
    bool is_from_table = false;
    CandidateChooser::Plan planned;  // for the next operation
    // Operations before that which all go the same way, with that word; for them alone, no more
    // than this is looked at.
    std::size_t quiet = 0;
    std::optional<TuningWord> quiet_word;
    std::uint64_t told = 0;  // sessions whose verdict is in the table
  };

  // Smaller operations are over before a clock is read.
  [[nodiscard]] bool is_tuned(std::size_t bytes) const noexcept { return bytes > kLeastBytes; }
  static constexpr std::size_t kLeastBytes = std::size_t{8} << 10;

  // What a rank contributes, as far as the rank that chooses knows.
  [[nodiscard]] static std::size_t tuned_bytes(const Call& call) noexcept;
  [[nodiscard]] bool is_a_way(const Call& call, const TuningWord& word) const noexcept;
  [[nodiscard]] Class& class_of(const Call& call, TunedMemory memory, int size_class);
  void make_known(Class& its);
  void tell(Class& its);
  [[nodiscard]] std::optional<Offer> heard_way(const Call& call, TunedMemory memory,
                                               std::size_t bytes) const noexcept;
  [[nodiscard]] std::optional<TuningWord> word_of(const Class& its) const;
  [[nodiscard]] std::optional<TuningWord> choose(const Call& call, TunedMemory memory,
                                                 std::size_t bytes);

  const int rank_;
  const int ranks_;
  const TuningLimits limits_;
  const TuningRhythm rhythm_;
  TuningTable& table_;
  const std::size_t most_ahead_;  // bytes in one shot
  std::unordered_map<std::uint64_t, Class> classes_;
  // The last one that was looked for: programs repeat themselves.
  std::uint64_t last_code_ = 0;
  Class* last_ = nullptr;
  // The operation that has begun; null: not tuned.
  Class* running_ = nullptr;
  CandidateChooser::Plan plan_;
  std::size_t bytes_ = 0;
  std::chrono::steady_clock::time_point begun_;
  std::chrono::nanoseconds given_in_{0};
};

}  // namespace pydist
