#include <gtest/gtest.h>

#include "rank_processes.h"
#include "time_limit.h"

// libstdc++ counts the references of an exception where TSan doesn't see it: to TSan, the thread
// that lets go of it last destroys what another one may still read.
extern "C" [[gnu::visibility("default")]] const char* __tsan_default_suppressions() {
  return "race:std::__exception_ptr::exception_ptr::_M_release\n";
}

int main(int argc, char** argv) {
  if (const auto status = pydist::testing::play_rank_process(argc, argv)) {
    return *status;
  }
  ::testing::InitGoogleTest(&argc, argv);
  pydist::testing::install_time_limit();
  return RUN_ALL_TESTS();
}
