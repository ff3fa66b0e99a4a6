// Writes rounds as a trace that Perfetto and chrome://tracing show (PYDIST_TIMELINE).
//
// The file is valid JSON after every round. Each rank is a process there, and each of its models a
// thread.

#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>

#include "reducer/gradients/gradient_arena.h"
#include "reducer/round_times.h"

namespace pydist {

class Timeline {
 public:
  // The one of this process, for all of its models. Throws InvalidUsage where the file can't be
  // written. `path` gets the rank in front of its extension: trace.json is trace.rank0.json on
  // rank 0.
  [[nodiscard]] static std::shared_ptr<Timeline> open(const std::string& path, int rank);

  Timeline(const std::string& path, int rank);
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;
  ~Timeline();

  // Thread safe. `model` tells the models of a process apart.
  void write(const GradientArena& arena, const RoundTimes& times, std::uint64_t model,
             std::int64_t round);

 private:
  void event(const std::string& json);

  std::mutex mutex_;
  std::FILE* file_;  // guarded by mutex_
  int rank_;
  bool is_empty_ = true;  // guarded by mutex_
};

}  // namespace pydist
