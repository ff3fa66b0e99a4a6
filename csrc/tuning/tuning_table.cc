#include "tuning/tuning_table.h"

#include <cstddef>
#include <cstdlib>

namespace pydist {

std::optional<TuningEntry> found_by(const CandidateChooser& chooser,
                                    std::span<const Choice> candidates) {
  if (!chooser.medians()[chooser.current()]) {
    return std::nullopt;
  }
  TuningEntry entry;
  entry.choice = candidates[chooser.current()];
  for (std::size_t candidate = 0; candidate < candidates.size(); ++candidate) {
    if (const auto median = chooser.medians()[candidate]) {
      entry.times_us.emplace_back(candidates[candidate], *median);
    }
  }
  return entry;
}

TuningTable& TuningTable::of_process() {
  // Never destroyed: threads of the engine may look at it until the process ends.
  static auto* const table = new TuningTable();
  return *table;
}

std::optional<Choice> TuningTable::find_near(const TuningKey& key) const {
  const std::lock_guard lock(mutex_);
  std::optional<Choice> nearest;
  int distance = 0;
  for (const auto& [known, entry] : entries_) {
    if (known.kind == key.kind && known.memory == key.memory && known.ranks == key.ranks &&
        known.sends_too == key.sends_too) {
      const int steps = std::abs(known.size_class - key.size_class);
      if (!nearest || steps < distance) {
        nearest = entry.choice;
        distance = steps;
      }
    }
  }
  return nearest;
}

void TuningTable::put(const TuningKey& key, TuningEntry entry) {
  const std::lock_guard lock(mutex_);
  entries_.insert_or_assign(key, std::move(entry));
}

std::map<TuningKey, TuningEntry> TuningTable::entries() const {
  const std::lock_guard lock(mutex_);
  return entries_;
}

void TuningTable::replace(std::map<TuningKey, TuningEntry> entries) {
  const std::lock_guard lock(mutex_);
  entries_ = std::move(entries);
}

}  // namespace pydist
