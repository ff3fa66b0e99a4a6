#include "base/fork.h"

#include <pthread.h>

#include <atomic>

#include "base/error.h"

namespace pydist {
namespace {

std::atomic<bool> has_started{false};
std::atomic<bool> is_forked{false};

void mark_child() {
  if (has_started.load(std::memory_order_relaxed)) {
    is_forked.store(true, std::memory_order_relaxed);
  }
}

}  // namespace

void note_engine_started() noexcept {
  if (!has_started.exchange(true)) {
    ::pthread_atfork(nullptr, nullptr, mark_child);
  }
}

bool in_forked_child() noexcept { return is_forked.load(std::memory_order_relaxed); }

void require_not_forked() {
  if (in_forked_child()) [[unlikely]] {
    throw InvalidUsage(
        "pydist cannot be used in a process that was forked from a rank (a data-loader worker, "
        "say): it has none of the rank's threads. Call it in the rank itself, or start the process "
        "with the 'spawn' method.");
  }
}

}  // namespace pydist
