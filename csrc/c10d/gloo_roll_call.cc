#include "c10d/gloo_roll_call.h"

#include <chrono>
#include <exception>
#include <string>

#include "base/deadline.h"
#include "base/error.h"

namespace pydist {
namespace {

constexpr std::chrono::seconds kPatience{1};

std::string answer_key(std::uint64_t sequence, int rank) {
  return join("failed/", sequence, "/", rank);
}

}  // namespace

std::vector<int> find_missing(KeyValueStore& store, std::uint64_t sequence, int rank,
                              int size) noexcept {
  std::vector<int> missing;
  try {
    store.set(answer_key(sequence, rank), "here");
    const Deadline deadline = Deadline::in(kPatience);
    for (int peer = 0; peer < size; ++peer) {
      try {
        store.get(answer_key(sequence, peer), deadline);
      } catch (const Timeout&) {
        missing.push_back(peer);
      }
    }
  } catch (const std::exception&) {
    // The store went with the rank that hosted it.
    missing.clear();
  }
  return missing;
}

}  // namespace pydist
