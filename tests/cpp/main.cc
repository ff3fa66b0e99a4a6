#include <gtest/gtest.h>

#include "rank_processes.h"
#include "time_limit.h"

int main(int argc, char** argv) {
  if (const auto status = pydist::testing::play_rank_process(argc, argv)) {
    return *status;
  }
  ::testing::InitGoogleTest(&argc, argv);
  pydist::testing::install_time_limit();
  return RUN_ALL_TESTS();
}
