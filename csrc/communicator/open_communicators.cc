#include "communicator/open_communicators.h"

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "communicator/departure.h"
#include "topology/told_error.h"

namespace pydist {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<Communicator>> all;  // guarded by mutex
};

// Never destroyed: communicators may outlive the statics of this file.
Registry& registry() {
  static auto* const the_registry = new Registry;
  return *the_registry;
}

std::atomic<bool> is_ending{false};

}  // namespace

void note_open(const CommunicatorPtr& communicator) {
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  std::erase_if(known.all, [](const auto& each) { return each.expired(); });
  known.all.push_back(communicator);
}

bool is_process_ending() noexcept { return is_ending.load(std::memory_order_relaxed); }

void abort_all(const std::string& message, const std::string& cause) {
  require_not_forked();
  std::vector<std::weak_ptr<Communicator>> all;
  {
    Registry& known = registry();
    const std::lock_guard lock(known.mutex);
    all = known.all;
  }
  // The oldest first: most wait for those.
  for (const auto& each : all) {
    if (const CommunicatorPtr communicator = each.lock()) {
      try {
        communicator->abort(Aborted(message, own_blame(communicator->rank(), cause)));
      } catch (const std::exception& error) {
        log_line(LogLevel::kError, error.what());
      }
    }
  }
}

void shut_down_all() noexcept {
  note_program_end();
  is_ending.store(true, std::memory_order_relaxed);
  std::vector<std::weak_ptr<Communicator>> all;
  {
    Registry& known = registry();
    const std::lock_guard lock(known.mutex);
    all.swap(known.all);
  }
  // The newest first: those that others are built on outlive them.
  for (auto each = all.rbegin(); each != all.rend(); ++each) {
    if (const CommunicatorPtr communicator = each->lock()) {
      communicator->shutdown();
    }
  }
}

}  // namespace pydist
