#include "health/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace pydist {
namespace {

// Not FUTEX_PRIVATE: the word is shared between processes.
void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::nanoseconds longest) noexcept {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(longest);
  timespec timeout{};
  timeout.tv_sec = seconds.count();
  timeout.tv_nsec = (longest - seconds).count();
  ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

}  // namespace

void Doorbell::wake() noexcept {
  rings_.fetch_add(1, std::memory_order_release);
  ::syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Sleeper::sleep(std::chrono::nanoseconds longest) noexcept {
  if (longest > std::chrono::nanoseconds::zero()) {
    futex_wait(bell_.rings_, seen_, longest);
  }
}

}  // namespace pydist
