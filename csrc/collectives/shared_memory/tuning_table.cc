#include "collectives/shared_memory/tuning_table.h"

#include <cstdlib>

namespace pydist {

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
    if (known.kind == key.kind && known.memory == key.memory && known.ranks == key.ranks) {
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
