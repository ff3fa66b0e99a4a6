#include "base/engine_thread.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <string>
#include <thread>

namespace pydist {
namespace {

bool is_blocked(int signal) {
  sigset_t mask;
  ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  return ::sigismember(&mask, signal) == 1;
}

TEST(EngineThreadTest, HasANameAndHandlesNoSignals) {
  const bool was_blocked = is_blocked(SIGUSR1);
  bool blocks = false;
  std::string name;
  EngineThread thread("pydist-test", [&] {
    blocks = is_blocked(SIGUSR1) && is_blocked(SIGINT) && is_blocked(SIGTERM);
    std::array<char, 16> text{};
    while (name != "pydist-test") {  // it gets the name from the thread that starts it
      ::pthread_getname_np(::pthread_self(), text.data(), text.size());
      name = text.data();
      std::this_thread::yield();
    }
  });
  thread.join();
  EXPECT_TRUE(blocks);
  EXPECT_EQ(name, "pydist-test");
  EXPECT_EQ(is_blocked(SIGUSR1), was_blocked);
}

TEST(EngineThreadTest, WhoeverDropsOrReplacesItJoinsIt) {
  std::atomic<bool> has_first_ended{false};
  std::atomic<bool> has_second_ended{false};
  const auto ends_late = [](std::atomic<bool>& has_ended) {
    return [&has_ended] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      has_ended = true;
    };
  };
  {
    EngineThread thread("pydist-test", ends_late(has_first_ended));
    thread = EngineThread("pydist-test", ends_late(has_second_ended));
    EXPECT_TRUE(has_first_ended);
    EXPECT_TRUE(thread.has_started());
  }
  EXPECT_TRUE(has_second_ended);
  EngineThread none;
  EXPECT_FALSE(none.has_started());
  none.join();
  none.let_go();
}

TEST(EngineThreadTest, AThreadDoesNotWaitForItself) {
  std::atomic<bool> has_ended{false};
  auto* const own = new EngineThread;
  std::atomic<bool> is_there{false};
  *own = EngineThread("pydist-test", [&] {
    while (!is_there) {
      std::this_thread::yield();
    }
    EXPECT_TRUE(own->is_this_thread());
    delete own;
    has_ended = true;
  });
  is_there = true;
  while (!has_ended) {
    std::this_thread::yield();
  }
}

}  // namespace
}  // namespace pydist
