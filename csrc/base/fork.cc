#include "base/fork.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

#include "base/error.h"

namespace pydist {
namespace {

std::atomic<int> groups_at_work{0};
std::atomic<bool> is_forked{false};
// How many forks lie between this process and the one that loaded the engine.
std::atomic<unsigned> fork_count{0};

// Those that children are not to keep.
struct Descriptors {
  std::mutex mutex;
  std::set<int> all;  // guarded by mutex
};
Descriptors& not_inherited() {
  static auto& descriptors = *new Descriptors;
  return descriptors;
}

// So that no thread that does not exist in the child holds the lock there.
void lock_descriptors() { not_inherited().mutex.lock(); }
void unlock_descriptors() { not_inherited().mutex.unlock(); }

void drop_descriptors() {
  // In place of each comes one that is of no use: the child may still close what it has inherited,
  // and must not close what has got the same number since.
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int descriptor : not_inherited().all) {
    if (nothing < 0 || ::dup3(nothing, descriptor, O_CLOEXEC) < 0) {
      ::close(descriptor);
    }
  }
  if (nothing >= 0) {
    ::close(nothing);
  }
  not_inherited().all.clear();
}

void note_fork() {
  fork_count.fetch_add(1, std::memory_order_relaxed);
  if (groups_at_work.load(std::memory_order_relaxed) > 0) {
    is_forked.store(true, std::memory_order_relaxed);
  }
  drop_descriptors();
  unlock_descriptors();
}

void watch_forks() noexcept {
  [[maybe_unused]] static const int is_watching =
      ::pthread_atfork(lock_descriptors, unlock_descriptors, note_fork);
}

}  // namespace

NotInherited::NotInherited(int descriptor) : descriptor_(descriptor) {
  watch_forks();
  const std::lock_guard lock(not_inherited().mutex);
  not_inherited().all.insert(descriptor);
}

NotInherited::~NotInherited() {
  const std::lock_guard lock(not_inherited().mutex);
  not_inherited().all.erase(descriptor_);
}

GroupAtWork::GroupAtWork() noexcept {
  watch_forks();
  groups_at_work.fetch_add(1, std::memory_order_relaxed);
}

void GroupAtWork::end() noexcept {
  if (!has_ended_.exchange(true)) {
    groups_at_work.fetch_sub(1, std::memory_order_relaxed);
  }
}

Birth::Birth() noexcept {
  watch_forks();
  forks_ = fork_count.load(std::memory_order_relaxed);
}

bool Birth::is_inherited() const noexcept {
  return forks_ != fork_count.load(std::memory_order_relaxed);
}

bool in_forked_child() noexcept { return is_forked.load(std::memory_order_relaxed); }

void require_not_forked() {
  if (in_forked_child()) [[unlikely]] {
    throw InvalidUsage(
        "pydist cannot be used in a process that was forked from a rank amid its job (a "
        "data-loader worker, say): it has none of the rank's threads. Call it in the rank itself, "
        "start the process with the 'spawn' method, or leave the job before the fork: "
        "pydist.shutdown(), and torch.distributed.destroy_process_group() for a group of the "
        "script's own.");
  }
}

}  // namespace pydist
