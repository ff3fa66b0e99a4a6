#include "base/log.h"

#include <gtest/gtest.h>

#include <string>

namespace pydist {
namespace {

constexpr const char* kHealth = "/src/csrc/health/peer_death_monitor.cc";
constexpr const char* kNccl = "csrc/communicator/nccl/late_ends.cc";

class LogTest : public ::testing::Test {
 protected:
  ~LogTest() override {
    set_log_levels({});
    set_log_rank(-1);
  }

  static std::string logged(LogLevel level, const char* file) {
    ::testing::internal::CaptureStderr();
    log_line(level, "the text", file);
    return ::testing::internal::GetCapturedStderr();
  }
};

TEST_F(LogTest, ASubsystemIsTheFolderOfTheFile) {
  EXPECT_EQ(subsystem_of(kHealth), "health");
  EXPECT_EQ(subsystem_of(kNccl), "nccl");
  EXPECT_EQ(subsystem_of("health/peer_death_monitor.cc"), "health");
  EXPECT_EQ(subsystem_of("monitor.cc"), "");
  EXPECT_EQ(subsystem_of("/monitor.cc"), "");
  EXPECT_EQ(subsystem_of(""), "");
}

TEST_F(LogTest, TheLevelOfASubsystemCountsThereAlone) {
  set_log_levels({.all = LogLevel::kWarning, .of_subsystems = {{"health", LogLevel::kDebug}}});
  EXPECT_TRUE(is_logged(LogLevel::kDebug, kHealth));
  EXPECT_FALSE(is_logged(LogLevel::kInfo, kNccl));
  EXPECT_TRUE(is_logged(LogLevel::kWarning, kNccl));
  set_log_levels({.all = LogLevel::kInfo, .of_subsystems = {{"health", LogLevel::kError}}});
  EXPECT_FALSE(is_logged(LogLevel::kWarning, kHealth));
  EXPECT_TRUE(is_logged(LogLevel::kError, kHealth));
  EXPECT_TRUE(is_logged(LogLevel::kInfo, kNccl));
  set_log_levels({});
  EXPECT_TRUE(is_logged(LogLevel::kWarning, kHealth));
  EXPECT_FALSE(is_logged(LogLevel::kInfo, kNccl));
}

TEST_F(LogTest, ALineSaysRankHostAndSubsystem) {
  set_log_rank(2);
  const std::string line = logged(LogLevel::kWarning, kHealth);
  EXPECT_EQ(line.find("pydist[rank 2 on host "), 0u) << line;
  EXPECT_NE(line.find("] warning: health: the text\n"), std::string::npos) << line;
  set_log_rank(-1);
  EXPECT_EQ(logged(LogLevel::kWarning, kHealth).find("pydist[host "), 0u);
  EXPECT_EQ(logged(LogLevel::kInfo, kHealth), "");
}

TEST_F(LogTest, TheCallersFileTellsTheSubsystem) {
  ::testing::internal::CaptureStderr();
  log_line(LogLevel::kError, "from here");
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("error: base: from here"),
            std::string::npos);
}

}  // namespace
}  // namespace pydist
