// Whether a message comes through its lane or its receiver copies it from where its sender has it,
// by the times that both have taken.
//
// Which is quicker depends on the processor, on how far the cores are from each other, on whether
// this rank sends to the other one as well, and on whether the sender attends to its messages: the
// lane needs it, a read does not. So the receiver, who decides, times both, for messages about as
// long, as CandidateChooser says: at first in the way that groups before have found to be quicker,
// or else through the lane, and out of shared memory, which needs no kernel, by a read.
//
// Messages that are short enough come ahead, if their sender has not been told otherwise: when its
// receiver asks for one there is nothing left to choose. So the receiver tells the sender which way
// the next ones had better come, and times the first that does. The others, which were announced
// before the sender knew, go the best known way if they still can.
//
// For one thread at a time.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "base/deadline.h"
#include "tuning/candidate_chooser.h"
#include "tuning/tuning_table.h"

namespace pydist {

class MessageWays {
 private:
  struct Class {
    CandidateChooser chooser;
    std::uint64_t told = 0;  // sessions whose verdict is in the table
    // A message whose time is asked for is on its way. Until it has come, no other one's is, so
    // that times come in the order of the plans; and all go its way, so that none overtakes it.
    bool is_timing = false;
    bool is_timing_read = false;
    // No message has come so that it could go this way since it was planned.
    std::optional<CandidateChooser::Plan> due = {};
  };

 public:
  using Time = Deadline::Clock::time_point;

  // What a message's receiver finds when it asks for it.
  enum class Came : std::uint8_t {
    kAnnounced,  // it is where its sender has it, and comes through the lane as all of its length
                 // do
    kAhead,      // it is in the lane, and can't be read any more
    kNotAhead,   // it is where its sender has it, while others of its length come ahead: its time
                 // through the lane is not theirs
  };

  // How one message comes.
  class Way {
   public:
    [[nodiscard]] bool is_read() const noexcept { return is_read_; }
    // Whether the next ones of its class had better be, which is what to tell their sender.
    [[nodiscard]] bool is_next_read() const noexcept { return is_next_read_; }

   private:
    friend class MessageWays;
    bool is_read_ = false;
    bool is_next_read_ = false;
    Class* timed_ = nullptr;  // null: its time is not asked for
    double scale_ = 1;
    Time begin_;
  };

  // Without a rhythm nothing is tried, and what lies in shared memory is read. `table`: where to
  // look for what is known, and to keep what is found; null: nowhere.
  explicit MessageWays(const std::optional<TuningRhythm>& rhythm, TuningTable* table = nullptr)
      : rhythm_(rhythm), table_(table) {}

  // For a message that may be read, and comes from now on.
  // `memory`: kOrdinary or kShared, where it lies.
  [[nodiscard]] Way choose(std::size_t bytes, TunedMemory memory, bool do_both_send, Time now,
                           Came came = Came::kAnnounced);
  // It has come in that way. `since`: when the one before it, from the same rank, had come; they
  // take turns in the lane.
  static void note(const Way& way, Time since, Time now);
  // It comes in another way after all, or its time would say nothing.
  static void drop(Way& way) noexcept;

 private:
  // Longer ones go through the lane, whose two ends share the work: what a core's cache does not
  // hold, one copy by one of them, or by the kernel, is no quicker.
  static constexpr int kLongestClass = 25;  // 32 MiB

  [[nodiscard]] Class& class_of(const TuningKey& key);

  const std::optional<TuningRhythm> rhythm_;
  TuningTable* table_;
  std::map<TuningKey, Class> classes_;  // they stay where they are
};

}  // namespace pydist
