#include "base/interruption.h"

#include <atomic>

namespace pydist {
namespace {

std::atomic<InterruptionCheck> the_check{nullptr};

}  // namespace

void set_interruption_check(InterruptionCheck check) noexcept { the_check.store(check); }

void check_interruption() {
  if (const InterruptionCheck check = the_check.load()) {
    check();
  }
}

}  // namespace pydist
