// The native backend, in our own code: the ranks of a host share memory, hosts are joined by TCP.

#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "base/env.h"
#include "communicator/communicator.h"
#include "health/known_processes.h"
#include "health/long_wait.h"
#include "topology/key_value_store.h"
#include "topology/rendezvous.h"
#include "tuning/candidate_chooser.h"

namespace pydist {

class Endpoint;
class JobSecret;
class OwnIntroduction;

struct NativeOptions {
  // Unique among the groups that share the store; the same on every rank.
  std::string name = "world";
  Environment environment = Environment::read();
  // By which the ranks know each other; null: by that of the environment, or one that rank 0 makes.
  std::shared_ptr<const JobSecret> secret = nullptr;
  // Called now and then while the ranks meet; throws where somebody will never come. split() asks
  // the parent group's health.
  CheckHope check_hope = nullptr;
  // The address by which this host reaches its job, where other hosts are to connect to it;
  // nothing: any that it has. PYDIST_INTERFACE overrides it.
  std::optional<std::string> address = std::nullopt;
  // By rank, what is known of them before they meet; empty: nothing.
  KnownProcesses processes = {};
  // When operations are timed, where PYDIST_TUNING has it so; tests take another one.
  TuningRhythm tuning = {};
  // For operations, and for the meeting of the ranks; tests take less.
  std::chrono::milliseconds long_wait = kLongWait;

  // Nothing where none is timed.
  [[nodiscard]] std::optional<TuningRhythm> rhythm() const {
    return environment.tuning == TuningChoice::kOff ? std::nullopt : std::optional(tuning);
  }
};

// What this rank, and those that it meets, have said of themselves before.
struct Introduced {
  // What the process shows to its peers; null for the process's own, or that of `own`. Tests in
  // which threads play ranks give each thread one.
  std::shared_ptr<Endpoint> endpoint = nullptr;
  // This rank's, where all have heard the introductions of all.
  std::shared_ptr<OwnIntroduction> own = nullptr;
  // What rank 0 has made of them (make_native_roster()); there if `own` is.
  std::optional<std::string> roster = std::nullopt;
};

// Joins a group of `size` ranks over `store`, as `rank`. Collective over the group. The store must
// live as long as the group: split() meets there.
//
// Succeeds on every rank, or throws the same TransportError on every rank that names what stands
// in the way (hosts that can't reach each other, no room for shared memory); a rank that never
// comes is a Timeout that names it.
[[nodiscard]] CommunicatorPtr create_native_communicator(StorePtr store, int rank, int size,
                                                         const NativeOptions& options,
                                                         Introduced introduced = {});

}  // namespace pydist
