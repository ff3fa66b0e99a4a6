// Whether a message comes through its lane or is read out of its sender's process, by the times
// that both have taken.
//
// Which is quicker depends on the processor, on how far the cores are from each other, on whether
// this rank sends to the other one as well, and on whether the sender attends to its messages: the
// lane needs it, a read does not. So the receiver, who decides, times both, for messages about as
// long, as CandidateChooser says: at first through the lane.
//
// For one thread at a time.

#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <utility>

#include "base/deadline.h"
#include "tuning/candidate_chooser.h"

namespace pydist {

class MessageWays {
 public:
  // How one message comes.
  class Way {
   public:
    [[nodiscard]] bool is_read() const noexcept { return is_read_; }

   private:
    friend class MessageWays;
    bool is_read_ = false;
    CandidateChooser* chooser_ = nullptr;  // null: its time is not asked for
    Deadline::Clock::time_point begin_;
  };

  // Without a rhythm nothing is tried. `usually_reads`: where nothing has been tried.
  explicit MessageWays(const std::optional<TuningRhythm>& rhythm, bool usually_reads = false)
      : rhythm_(rhythm), usually_reads_(usually_reads) {}

  // For a message that may be read, and comes from now on. `is_alone`: no other one is under way
  // from the same rank, so that its time says something.
  [[nodiscard]] Way choose(std::size_t bytes, bool do_both_send, bool is_alone);
  // It has come, in the way that was chosen.
  static void note(const Way& way);

 private:
  // Longer ones go through the lane, whose two ends share the work: what a core's cache does not
  // hold, the kernel copies no quicker than they do.
  static constexpr int kLongestClass = 25;  // 32 MiB

  const std::optional<TuningRhythm> rhythm_;
  const bool usually_reads_;
  // By whether both send, and by the bits of the length. They stay where they are.
  std::map<std::pair<bool, int>, CandidateChooser> choosers_;
};

}  // namespace pydist
