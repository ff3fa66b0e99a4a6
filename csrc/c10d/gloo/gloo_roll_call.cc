#include "c10d/gloo/gloo_roll_call.h"

#include <exception>

#include "base/deadline.h"
#include "base/error.h"

namespace pydist {
namespace {

std::string answer_key(std::uint64_t sequence, int rank) {
  return join("failed/", sequence, "/", rank);
}

}  // namespace

std::string call_roll(KeyValueStore& store, std::uint64_t sequence, int rank, int size) noexcept {
  try {
    store.set(answer_key(sequence, rank), "here");
    const Deadline deadline = Deadline::in(kRollCallPatience);
    std::string missing;
    for (int peer = 0; peer < size; ++peer) {
      try {
        store.get(answer_key(sequence, peer), deadline);
      } catch (const Timeout&) {
        missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(peer);
      }
    }
    return missing.empty()
               ? missing
               : join("No answer from ", missing,
                      " (late, stopped, dead, or still waiting for one of the others).");
  } catch (const std::exception&) {
    return "The job's store does not answer either: the process that hosts it (the launcher or "
           "rank "
           "0) may be stopped or dead.";
  }
}

}  // namespace pydist
