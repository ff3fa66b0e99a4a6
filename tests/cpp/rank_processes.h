// Ranks as processes: each is this very test program, started anew with a flag, so that it comes
// from a process without threads whatever the tests before have done. They meet over files.
//
// A rank dies with the test that started it.

#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "ranks.h"
#include "topology/key_value_store.h"

namespace pydist::testing {

// What a rank of a process test does, by name. `argument` is the test's. Define at namespace scope.
class RankProgram {
 public:
  // The communicator is joined; its endpoint is the process's own (endpoint is null).
  using Function = std::function<void(RankOfTest&, const std::string& argument)>;

  RankProgram(const std::string& name, Function function);
};

// To be called first in main(): plays a rank, and returns the exit status, where this process was
// started as one. Expectations count there too.
[[nodiscard]] std::optional<int> play_rank_process(int argc, char** argv);

// How a rank ended: by itself, with or without an error, or by a signal.
struct RankOutcome {
  bool has_ended_by_itself = false;
  std::optional<ErrorDescription> error;
};

// The processes of one test. Used by its thread alone.
class RankProcesses {
 public:
  // `hosts`: as for run_ranks().
  RankProcesses(const std::string& program, int size, const std::string& argument = "",
                const HostsOfRanks& hosts = {});
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;
  ~RankProcesses();  // kills whatever still runs

  // The store that the ranks meet in; tests and ranks may also leave each other words there.
  [[nodiscard]] KeyValueStore& store() noexcept { return *store_; }

  void signal(int rank, int number) const;
  // Waits for the rank's process to end; fails the test and kills it where that takes longer.
  RankOutcome wait(int rank, std::chrono::milliseconds limit = std::chrono::seconds(40));

 private:
  std::filesystem::path folder_;
  StorePtr store_;
  std::vector<pid_t> pids_;  // 0 once it has ended
};

// Kills rank 1 so long after each of `size` ranks has left a word in the store, under `key` and its
// number. Expects all others to end at once, with an error that names it as lost.
void expect_death_is_named(RankProcesses& ranks, int size, const std::string& key,
                           std::chrono::milliseconds delay);

}  // namespace pydist::testing
