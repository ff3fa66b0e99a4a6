// Who is to blame for an error, on its way from one rank to the others.

#pragma once

#include <string>

#include "base/error.h"

namespace pydist {

// This process, which is `rank`, as the culprit.
[[nodiscard]] Blame own_blame(int rank, std::string cause);

// Whom to blame where `rank`, this process, gives up a group because of `reason`: the ranks that
// the error names, nobody where others may have caused it, and otherwise this rank.
[[nodiscard]] Blame blame_of(const Error& reason, int rank);

// "4711 a", a process id and a host, as ranks tell it each other; for a blame that lacks both.
[[nodiscard]] std::string own_place();
void set_place(Blame& blame, const std::string& place);

// What a rank tells the others of an error, through a store.
struct ToldError {
  int teller = -1;
  ErrorDescription error;

  [[nodiscard]] std::string to_text() const;
  // A text of another form is the message of a PeerLost: anybody may write into a store.
  [[nodiscard]] static ToldError from_text(const std::string& text);
};

}  // namespace pydist
