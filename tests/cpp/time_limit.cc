#include "time_limit.h"

#include <execinfo.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace pydist::testing {
namespace {

// An alarm rather than a watching thread: tests fork, and a forked child must come from a process
// with no thread but its own (TSan refuses otherwise). Everything below runs in signal handlers, so
// it calls only what is safe there.

constexpr int kStackSignal = SIGUSR2;
constexpr int kExitStatus = 124;  // as timeout(1)
constexpr int kStackWait_ms = 200;

std::atomic<int> stacks_written{0};
char running_test[256] = "";

void write_text(const char* text) {
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text, std::strlen(text));
}

void write_own_stack(int /*signal*/) {
  char title[64];
  std::snprintf(title, sizeof title, "\n--- thread %ld\n", syscall(SYS_gettid));
  write_text(title);
  void* frames[64];
  backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
  stacks_written.fetch_add(1);
}

// One thread after the other, so that the stacks do not mix.
void ask_for_stack(long thread) {
  const int before = stacks_written.load();
  if (syscall(SYS_tgkill, getpid(), thread, kStackSignal) != 0) {
    return;
  }
  for (int waited_ms = 0; waited_ms < kStackWait_ms && stacks_written.load() == before;
       ++waited_ms) {
    const timespec one_ms{0, 1'000'000};
    nanosleep(&one_ms, nullptr);
  }
}

// What getdents64 writes: this head, then a type byte and the terminated name.
struct DirectoryEntry {
  std::uint64_t inode;
  std::int64_t offset;
  std::uint16_t length;
};
constexpr long kNameOffset = sizeof(DirectoryEntry::inode) + sizeof(DirectoryEntry::offset) +
                             sizeof(DirectoryEntry::length) + 1;

void write_other_stacks() {
  const int tasks = open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (tasks < 0) {
    return;
  }
  const long self = syscall(SYS_gettid);
  alignas(DirectoryEntry) char entries[4096];
  for (;;) {
    const long bytes = syscall(SYS_getdents64, tasks, entries, sizeof entries);
    if (bytes <= 0) {
      break;
    }
    for (long at = 0; at < bytes;) {
      const auto* entry = reinterpret_cast<const DirectoryEntry*>(entries + at);
      const long thread = std::atol(entries + at + kNameOffset);
      if (thread > 0 && thread != self) {
        ask_for_stack(thread);
      }
      at += entry->length;
    }
  }
  close(tasks);
}

void on_expiry(int /*signal*/) {
  write_text("\n");
  write_text(running_test);
  write_text(" passed its time limit; every thread is here:\n");
  write_own_stack(0);
  write_other_stacks();
  _exit(kExitStatus);
}

class TimeLimit : public ::testing::EmptyTestEventListener {
 public:
  explicit TimeLimit(unsigned limit_s) : limit_s_(limit_s) {}

  void OnTestStart(const ::testing::TestInfo& test) override {
    std::snprintf(running_test, sizeof running_test, "%s.%s", test.test_suite_name(), test.name());
    alarm(limit_s_);
  }

  void OnTestEnd(const ::testing::TestInfo& /*test*/) override { alarm(0); }

 private:
  const unsigned limit_s_;
};

void handle(int signal, void (*handler)(int)) {
  struct sigaction action{};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  sigaction(signal, &action, nullptr);
}

}  // namespace

std::chrono::seconds test_limit() {
  if (const char* const limit_s = std::getenv("PYDIST_TEST_LIMIT_S")) {
    return std::chrono::seconds(std::atol(limit_s));
  }
  const char* const patience = std::getenv("TEST_PATIENCE");
  const double times = patience == nullptr ? 1.0 : std::max(1.0, std::atof(patience));
  return std::chrono::seconds(static_cast<long>(times * PYDIST_TEST_LIMIT_S));
}

void install_time_limit() {
  void* warm_up[1];
  backtrace(warm_up, 1);  // the first call allocates, which a signal handler must not
  handle(kStackSignal, write_own_stack);
  handle(SIGALRM, on_expiry);
  // GoogleTest owns the listener.
  ::testing::UnitTest::GetInstance()->listeners().Append(
      new TimeLimit(static_cast<unsigned>(test_limit().count())));
}

}  // namespace pydist::testing
