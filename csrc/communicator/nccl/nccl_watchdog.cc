#include "communicator/nccl/nccl_watchdog.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "base/engine_thread.h"
#include "base/fork.h"
#include "communicator/nccl/nccl_group.h"

namespace pydist {
namespace {

// How long the end of the threads is waited for: the driver may keep one of them.
constexpr std::chrono::seconds kEndPatience{1};

}  // namespace

// The threads hold it, and may outlive the watchdog.
struct NcclWatchdog::Shared {
  struct Look {
    const char* name;
    std::chrono::milliseconds (NcclGroup::*at)() noexcept;
    EngineThread thread;
    std::condition_variable wakened;
    std::atomic<bool> is_idle{true};
    bool has_ended = false;  // guarded by mutex
  };

  std::mutex mutex;
  std::condition_variable ended;
  std::vector<std::weak_ptr<NcclGroup>> groups;  // guarded by mutex
  bool is_stopping = false;                      // guarded by mutex
  std::array<Look, 2> looks{{{"pydist-nccl", &NcclGroup::watch, {}, {}},
                             {"pydist-nccl-evt", &NcclGroup::settle, {}, {}}}};
};

std::shared_ptr<NcclWatchdog> NcclWatchdog::of_process() {
  static auto& mutex = *new std::mutex;
  static auto& known = *new std::weak_ptr<NcclWatchdog>;
  const std::lock_guard lock(mutex);
  std::shared_ptr<NcclWatchdog> watchdog = known.lock();
  if (watchdog == nullptr) {
    watchdog = std::make_shared<NcclWatchdog>();
    known = watchdog;
  }
  return watchdog;
}

NcclWatchdog::NcclWatchdog() : shared_(std::make_shared<Shared>()) {
  for (std::size_t i = 0; i < shared_->looks.size(); ++i) {
    Shared::Look& look = shared_->looks[i];
    look.thread = EngineThread(look.name, [shared = shared_, i] { run(shared, i); });
  }
}

NcclWatchdog::~NcclWatchdog() {
  if (in_forked_child()) {
    return;  // the threads, and the lock that one of them may hold, are the parent's
  }
  const auto patience = std::chrono::steady_clock::now() + kEndPatience;
  std::unique_lock lock(shared_->mutex);
  shared_->is_stopping = true;
  for (Shared::Look& look : shared_->looks) {
    look.wakened.notify_all();
  }
  for (Shared::Look& look : shared_->looks) {
    // The last group may end on one of the threads, which then ends by itself.
    const bool may_join = look.thread.is_this_thread() ||
                          shared_->ended.wait_until(lock, patience, [&] { return look.has_ended; });
    lock.unlock();
    may_join ? look.thread.join() : look.thread.let_go();
    lock.lock();
  }
}

void NcclWatchdog::watch(const std::shared_ptr<NcclGroup>& group) {
  const std::lock_guard lock(shared_->mutex);
  shared_->groups.push_back(group);
}

void NcclWatchdog::wake() noexcept {
  for (Shared::Look& look : shared_->looks) {
    if (look.is_idle.load(std::memory_order_seq_cst)) {
      const std::lock_guard lock(shared_->mutex);
      look.is_idle.store(false, std::memory_order_relaxed);
      look.wakened.notify_all();
    }
  }
}

void NcclWatchdog::run(const std::shared_ptr<Shared>& shared, std::size_t number) {
  Shared::Look& look = shared->looks[number];
  std::unique_lock lock(shared->mutex);
  while (!shared->is_stopping) {
    std::vector<std::shared_ptr<NcclGroup>> groups;
    std::erase_if(shared->groups, [](const auto& each) { return each.expired(); });
    for (const auto& each : shared->groups) {
      if (auto group = each.lock()) {
        groups.push_back(std::move(group));
      }
    }
    // Before the look: whatever is launched after it finds the thread idle, and wakes it.
    look.is_idle.store(true, std::memory_order_seq_cst);
    lock.unlock();
    auto pause = std::chrono::milliseconds::max();
    for (const auto& group : groups) {
      pause = std::min(pause, ((*group).*look.at)());
    }
    groups.clear();
    lock.lock();
    const auto is_wanted = [&] {
      return shared->is_stopping || !look.is_idle.load(std::memory_order_relaxed);
    };
    if (pause != std::chrono::milliseconds::max()) {
      look.wakened.wait_for(lock, pause, is_wanted);
    } else {
      look.wakened.wait(lock, is_wanted);
    }
  }
  look.has_ended = true;
  shared->ended.notify_all();
}

}  // namespace pydist
