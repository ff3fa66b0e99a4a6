// How the ranks of a group on gloo find out that it will not stand, and all of them why.
//
// Gloo connects the ranks by itself, and passes on no more than the text of what goes wrong. So
// what is learned while it waits is kept here, and told to the others through the group's store.

#pragma once

#include <exception>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/interruption.h"
#include "health/known_processes.h"
#include "topology/key_value_store.h"
#include "topology/rendezvous.h"

namespace pydist {

// Used by one thread.
class GlooMeeting {
 public:
  // `processes` and `check_hope`: as for create_gloo_communicator().
  GlooMeeting(StorePtr store, int rank, std::string name, KnownProcesses processes,
              CheckHope check_hope);

  // Tells the others that this rank has come.
  void say_here(Deadline deadline);

  // For gloo to call while it waits: throws where the others will not come, or the user ends the
  // wait.
  void check_hope();

  // A wait that is not gloo's.
  template <typename Wait>
  void run(const Wait& wait) {
    noting_interruption(interruption_, wait);
  }

  // For the handler of what has kept the group from standing: tells the others, and throws the
  // reason.
  [[noreturn]] void tell_and_throw_why();

 private:
  // The exception that is being handled, or the one that gloo has made it of. Where gloo itself met
  // the end of a peer, that is asked for now.
  [[nodiscard]] std::exception_ptr first_error() const;
  // Those that have not come; where all have, those that do not run.
  [[nodiscard]] std::vector<int> missing() const;
  // A rank whose end has cut a connection; `otherwise` where that is not found.
  [[nodiscard]] ErrorDescription end_of_peer(ErrorDescription otherwise) const;
  // Why this rank cannot join, for the others and as its own error.
  [[nodiscard]] ErrorDescription own_failure(ErrorDescription& why) const;

  const StorePtr store_;
  const int rank_;
  const std::string name_;
  const KnownProcesses processes_;
  const CheckHope check_hope_;
  std::exception_ptr lost_;
  std::exception_ptr interruption_;
};

}  // namespace pydist
