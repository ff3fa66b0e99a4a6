#include "ranks_log.h"

#include <gtest/gtest.h>

#include <cstddef>

namespace pydist::testing {

std::string log_of(int size, const RankFunction& function) {
  ::testing::internal::CaptureStderr();
  run_ranks(size, function);
  return ::testing::internal::GetCapturedStderr();
}

int occurrences(const std::string& text, const std::string& part) {
  int count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

}  // namespace pydist::testing
