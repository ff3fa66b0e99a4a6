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

RollCall call_roll(KeyValueStore& store, std::uint64_t sequence, int rank, int size) noexcept {
  try {
    store.set(answer_key(sequence, rank), "here");
    const Deadline deadline = Deadline::in(kRollCallPatience);
    std::string missing;
    RollCall called;
    for (int peer = 0; peer < size; ++peer) {
      try {
        store.get(answer_key(sequence, peer), deadline);
      } catch (const Timeout&) {
        missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(peer);
        called.missing.push_back(peer);
      }
    }
    if (!missing.empty()) {
      called.sentence = join("No answer from ", missing,
                             " (late, stopped, dead, or still waiting for one of the others).");
    }
    return called;
  } catch (const std::exception&) {
    return {
        "The job's store does not answer either: the process that hosts it (the launcher or "
        "rank 0) may be stopped or dead.",
        {}};
  }
}

}  // namespace pydist
