// A hard time limit for each test of this process.
//
// When a test passes its limit, the stack of every thread (threads are ranks in these tests) is
// written to stderr and the process exits with status 124: a hang becomes a failure that shows
// where each rank is. A forked child has no limit of its own; it should die with its parent.

#pragma once

#include <chrono>

namespace pydist::testing {

// Limits each test from now on. Call once, before RUN_ALL_TESTS, from the main thread.
// PYDIST_TEST_LIMIT_S in the environment overrides `limit` (a debugger wants a long one).
void install_time_limit(std::chrono::seconds limit);

}  // namespace pydist::testing
