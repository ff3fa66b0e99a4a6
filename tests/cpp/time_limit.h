// A hard time limit for each test of this process.
//
// When a test passes its limit, the stack of every thread (threads are ranks in these tests) is
// written to stderr and the process exits with status 124: a hang becomes a failure that shows
// where each rank is. A forked child has no limit of its own; it should die with its parent.

#pragma once

#include <chrono>

namespace pydist::testing {

// The limit of a test: PYDIST_TEST_LIMIT_S of the environment (a debugger wants a long one),
// otherwise the build's, times TEST_PATIENCE of the environment (a slow machine).
[[nodiscard]] std::chrono::seconds test_limit();

// Limits each test from now on. Call once, before RUN_ALL_TESTS, from the main thread.
void install_time_limit();

}  // namespace pydist::testing
