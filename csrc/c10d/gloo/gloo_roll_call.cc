#include "c10d/gloo/gloo_roll_call.h"

#include <exception>

#include "base/deadline.h"
#include "base/error.h"

namespace pydist {
namespace {

// How long it waits for an answer before it looks for news.
constexpr std::chrono::milliseconds kLook{20};

std::string answer_key(std::uint64_t sequence, int rank) {
  return join("failed/", sequence, "/", rank);
}

}  // namespace

RollCall call_roll(KeyValueStore& store, std::uint64_t sequence, int rank, int size,
                   const std::function<bool()>& has_news) noexcept {
  const auto has_come = [&](int peer, Deadline deadline) {
    try {
      store.get(answer_key(sequence, peer), deadline);
      return true;
    } catch (const Timeout&) {
      return false;
    }
  };
  try {
    store.set(answer_key(sequence, rank), "here");
    const Deadline deadline = Deadline::in(kRollCallPatience);
    std::string missing;
    RollCall called;
    for (int peer = 0; peer < size; ++peer) {
      while (!has_come(peer, deadline.earlier_of(Deadline::in(kLook)))) {
        if (has_news()) {
          return {};
        }
        if (deadline.has_passed()) {
          missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(peer);
          called.missing.push_back(peer);
          break;
        }
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
