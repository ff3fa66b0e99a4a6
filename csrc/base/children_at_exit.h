// What a process does about its children when it exits: it waits for them, so that whoever has
// started it sees one program.
//
// Python's own exit functions can't do that: they do not learn with which status the program ends,
// and a program that ends badly must not wait. So this runs behind them, where the C library tells
// the status (on_exit), and the interpreter is gone.
//
// - After a status of 0 the process waits without a limit. Once a child ends badly, the others get
//   a grace to end by themselves, then SIGTERM, and after another grace SIGKILL; the process ends
//   with that child's status.
// - After any other status the grace begins at once. Children that fail from then on do so because
//   of this process, so they are not blamed.
//
// Until exit() comes that far, a thread watches the children. Once one of them has ended badly, the
// process has the same grace for the rest of its exit functions before it gets these signals
// itself.
//
// A child that somebody else has waited for counts as one that ended well: its status is lost.
// Children that survive SIGKILL for a third grace, in the kernel, are left behind.
//
// Signals do then what they did before. A child that is to end with the process has asked the
// kernel for that.

#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <sys/types.h>

namespace pydist {

struct Child {
  std::string name;  // for messages: "rank 1"
  pid_t pid;
};

// A child that has ended badly before.
struct EarlierFailure {
  int status = 0;     // 0: there is none
  std::string words;  // what is still to be said of it; may be empty
};

// To be called once at most, by the process that has these children, late in its life: where a
// child ended badly, it ends with that status, and what was registered before runs no more.
void wait_for_children_at_exit(std::vector<Child> children, std::chrono::milliseconds grace,
                               const EarlierFailure& earlier);

}  // namespace pydist
