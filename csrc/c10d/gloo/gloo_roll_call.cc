#include "c10d/gloo/gloo_roll_call.h"

#include <exception>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "base/error.h"
#include "communicator/departure.h"

namespace pydist {
namespace {

// How often a rank that is missing is looked for.
constexpr std::chrono::milliseconds kLook{10};

std::string answer_key(std::uint64_t sequence, int rank) {
  return join("failed/", sequence, "/", rank);
}
std::string gone_key(int rank) { return join("gone/", rank); }
constexpr const char* kAnyGoneKey = "gone/any";

// Names a rank that is gone, or one after it that has died: that explains more than a departure.
RollCall name_gone(KeyValueStore& store, int rank, std::string how, int size) {
  for (int other = rank + 1; !how.ends_with(kHasDied) && other < size; ++other) {
    if (auto end = how_gone(store, other); end && end->ends_with(kHasDied)) {
      rank = other;
      how = std::move(*end);
    }
  }
  return {join("rank ", rank, " ", how, "."), {rank}, cause_in(how)};
}

}  // namespace

void tell_gone(KeyValueStore& store, int rank, const std::string& how) {
  store.set(gone_key(rank), how);
  store.set(kAnyGoneKey, "");
}

std::optional<std::string> how_gone(KeyValueStore& store, int rank) {
  return look_up(store, gone_key(rank));
}

std::optional<Gone> first_gone(KeyValueStore& store, const std::vector<int>& ranks) noexcept {
  try {
    if (!look_up(store, kAnyGoneKey)) {
      return std::nullopt;
    }
    for (const int rank : ranks) {
      if (auto how = how_gone(store, rank)) {
        return Gone{rank, std::move(*how)};
      }
    }
  } catch (const std::exception&) {
    // Others say so.
  }
  return std::nullopt;
}

std::string_view cause_in(std::string_view how) noexcept {
  for (const char* const each : {kHasDied, in_words(Departure::kProgramEnd)}) {
    if (how.ends_with(each)) {
      return each;
    }
  }
  return in_words(Departure::kShutdown);
}

RollCall call_roll(KeyValueStore& store, std::uint64_t sequence, int rank, int size,
                   bool counts_leavers, const Lookout& lookout) noexcept {
  try {
    store.set(answer_key(sequence, rank), "here");
    const Deadline deadline = Deadline::in(kRollCallPatience);
    RollCall called;
    for (int peer = 0; peer < size; ++peer) {
      while (!look_up(store, answer_key(sequence, peer))) {
        const auto how = how_gone(store, peer);
        if (how && (counts_leavers || how->ends_with(kHasDied))) {
          return name_gone(store, peer, *how, size);
        }
        if (lookout.has_news()) {
          return {};
        }
        if (deadline.has_passed() || lookout.is_disabled(peer)) {
          called.missing.push_back(peer);
          break;
        }
        std::this_thread::sleep_for(kLook);
      }
    }
    return called;
  } catch (const std::exception&) {
    return {
        "The job's store does not answer either: the process that hosts it (the launcher or "
        "rank 0) may be stopped or dead.",
        {},
        {}};
  }
}

}  // namespace pydist
