#include "topology/hosts.h"

#include <gtest/gtest.h>

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "topology/cgroup.h"

namespace pydist {
namespace {

TEST(HostsTest, TheIdentityIsStableAndCanBeOverridden) {
  const std::string mine = host_identity(std::nullopt);
  EXPECT_FALSE(mine.empty());
  EXPECT_EQ(host_identity(std::nullopt), mine);
  EXPECT_EQ(host_identity("a"), host_identity("a"));
  EXPECT_NE(host_identity("a"), host_identity("b"));
  EXPECT_NE(host_identity("a"), mine);
  // An override that happens to be what another host has by itself is still an override.
  EXPECT_NE(host_identity(mine), mine);
  EXPECT_FALSE(host_name().empty());
}

TEST(HostsTest, ProcessorsFollowTheAffinity) {
  const std::vector<int> all = allowed_processors();
  ASSERT_FALSE(all.empty());
  EXPECT_TRUE(std::is_sorted(all.begin(), all.end()));
  // On a thread of its own, so that no other test is confined.
  std::thread([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<std::size_t>(all.back()), &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(allowed_processors(), std::vector<int>{all.back()});
  }).join();
  EXPECT_EQ(allowed_processors(), all);
}

TEST(HostsTest, AQuotaIsPositive) {
  if (const auto quota = processor_quota()) {
    EXPECT_GT(*quota, 0.0);
  }
}

TEST(HostsTest, TheTightestQuotaOfTheCgroupsAboveHolds) {
  const std::filesystem::path root =
      std::filesystem::path(::testing::TempDir()) / ("pydist-cgroup-" + std::to_string(::getpid()));
  const auto write = [&root](const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text << '\n';
  };
  const auto quota = [&root] { return processor_quota(root.string(), root / "membership"); };
  write("membership", "0::/slice/job/task");
  EXPECT_EQ(quota(), std::nullopt);
  write("slice/job/task/cpu.max", "max 100000");
  EXPECT_EQ(quota(), std::nullopt);
  write("slice/cpu.max", "150000 100000");
  write("slice/job/cpu.max", "400000 100000");
  EXPECT_EQ(quota(), 1.5);
  // What binds the top alone, as in a container that sees its own cgroup as the root.
  write("membership", "0::/");
  EXPECT_EQ(quota(), std::nullopt);
  write("cpu.max", "50000 100000");
  EXPECT_EQ(quota(), 0.5);
  // Version 1, where other controllers do not count.
  write("membership", "7:cpuset:/job\n4:cpu,cpuacct:/job");
  write("cpu,cpuacct/job/cpu.cfs_quota_us", "300000");
  write("cpu,cpuacct/job/cpu.cfs_period_us", "100000");
  write("cpuset/job/cpu.cfs_quota_us", "1000");
  write("cpuset/job/cpu.cfs_period_us", "100000");
  EXPECT_EQ(quota(), 3.0);
  std::filesystem::remove_all(root);
}

TEST(HostsTest, TheTightestLimitOfTasksHolds) {
  const std::filesystem::path root =
      std::filesystem::path(::testing::TempDir()) / ("pydist-tasks-" + std::to_string(::getpid()));
  const auto write = [&root](const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text << '\n';
  };
  const auto left = [&root] { return tasks_left(root.string(), root / "membership"); };
  write("membership", "0::/slice/job");
  EXPECT_EQ(left(), std::nullopt);
  write("slice/job/pids.max", "max");
  write("slice/job/pids.current", "7");
  EXPECT_EQ(left(), std::nullopt);
  write("slice/pids.max", "100");
  write("slice/pids.current", "60");
  EXPECT_EQ(left(), 40U);
  write("slice/job/pids.max", "5");  // lowered below what there is
  EXPECT_EQ(left(), 0U);
  write("membership", "3:pids:/job");
  write("pids/job/pids.max", "9");
  write("pids/job/pids.current", "8");
  EXPECT_EQ(left(), 1U);
  std::filesystem::remove_all(root);
}

TEST(HostsTest, TheFreezerOfAProcess) {
  const std::filesystem::path root = std::filesystem::path(::testing::TempDir()) /
                                     ("pydist-freezer-" + std::to_string(::getpid()));
  const auto write = [&](const std::string& name, const std::string& text) {
    std::filesystem::create_directories((root / name).parent_path());
    std::ofstream(root / name) << text << '\n';
  };
  const auto is_seven_frozen = [&] { return is_frozen(7, root.string(), root.string()); };
  EXPECT_FALSE(is_seven_frozen());
  write("7/cgroup", "6:freezer:/job\n0::/job");
  write("freezer/job/freezer.state", "THAWED");
  write("job/cgroup.events", "populated 1\nfrozen 0");
  EXPECT_FALSE(is_seven_frozen());
  write("job/cgroup.events", "populated 1\nfrozen 1");
  EXPECT_TRUE(is_seven_frozen());
  write("job/cgroup.events", "populated 1\nfrozen 0");
  write("freezer/job/freezer.state", "FROZEN");
  EXPECT_TRUE(is_seven_frozen());
  std::filesystem::remove_all(root);
}

TEST(HostsTest, CoresAreCountedOnceOverAllRanks) {
  const std::vector<int> both = {0, 1};
  EXPECT_TRUE(has_core_for_every_rank({both, both}, std::nullopt));
  EXPECT_FALSE(has_core_for_every_rank({both, both, both}, std::nullopt));
  // Pinned to cores of their own, and pinned all to the same.
  EXPECT_TRUE(has_core_for_every_rank({{0}, {1}, {7}}, std::nullopt));
  EXPECT_FALSE(has_core_for_every_rank({{3}, {3}}, std::nullopt));
  EXPECT_TRUE(has_core_for_every_rank({{3}}, std::nullopt));
}

TEST(HostsTest, TheQuotaCapsTheCores) {
  const std::vector<int> four = {0, 1, 2, 3};
  EXPECT_TRUE(has_core_for_every_rank({four, four}, 2.0));
  EXPECT_FALSE(has_core_for_every_rank({four, four}, 1.5));
  EXPECT_FALSE(has_core_for_every_rank({four}, 0.5));
  EXPECT_FALSE(has_core_for_every_rank({four, four, four, four, four}, 64.0));
}

}  // namespace
}  // namespace pydist
