// What the groups of this process have found to be fastest, for the groups that come after them.
//
// Filled from a file where there is one, and written there at the end
// (pydist/config/tuning_file.py). Thread safe.

#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "tuning/candidate_chooser.h"
#include "tuning/tuning_class.h"

namespace pydist {

struct TuningEntry {
  Choice choice;
  // What the candidates took in the last session, in µs for the largest of the class.
  std::vector<std::pair<Choice, double>> times_us;
  // By this process, where nothing was pinned.
  bool is_learnt = false;
};

// What a chooser among these has found; nothing where nobody has gone the way that it would go.
[[nodiscard]] std::optional<TuningEntry> found_by(const CandidateChooser& chooser,
                                                  std::span<const Choice> candidates);

class TuningTable {
 public:
  TuningTable() = default;
  TuningTable(const TuningTable&) = delete;
  TuningTable& operator=(const TuningTable&) = delete;
  ~TuningTable() = default;

  // The one of this process, which outlives all others of its objects.
  [[nodiscard]] static TuningTable& of_process();

  // For a key, or else for the nearest size of the same kind.
  [[nodiscard]] std::optional<Choice> find_near(const TuningKey& key) const;
  void put(const TuningKey& key, TuningEntry entry);

  [[nodiscard]] std::map<TuningKey, TuningEntry> entries() const;
  // Puts others in the place of all entries.
  void replace(std::map<TuningKey, TuningEntry> entries);

 private:
  mutable std::mutex mutex_;
  std::map<TuningKey, TuningEntry> entries_;  // guarded by mutex_
};

}  // namespace pydist
