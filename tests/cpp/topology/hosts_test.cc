#include "topology/hosts.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <string>
#include <thread>

#include "cgroup_tree.h"
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
  const testing::CgroupTree tree;
  const auto quota = [&tree] { return processor_quota(tree.path(), tree.path("membership")); };
  tree.write("membership", "0::/slice/job/task");
  EXPECT_EQ(quota(), std::nullopt);
  tree.write("slice/job/task/cpu.max", "max 100000");
  EXPECT_EQ(quota(), std::nullopt);
  tree.write("slice/cpu.max", "150000 100000");
  tree.write("slice/job/cpu.max", "400000 100000");
  EXPECT_EQ(quota(), 1.5);
  // What binds the top alone, as in a container that sees its own cgroup as the root.
  tree.write("membership", "0::/");
  EXPECT_EQ(quota(), std::nullopt);
  tree.write("cpu.max", "50000 100000");
  EXPECT_EQ(quota(), 0.5);
  // Version 1, where other controllers do not count.
  tree.write("membership", "7:cpuset:/job\n4:cpu,cpuacct:/job");
  tree.write("cpu,cpuacct/job/cpu.cfs_quota_us", "300000");
  tree.write("cpu,cpuacct/job/cpu.cfs_period_us", "100000");
  tree.write("cpuset/job/cpu.cfs_quota_us", "1000");
  tree.write("cpuset/job/cpu.cfs_period_us", "100000");
  EXPECT_EQ(quota(), 3.0);
}

TEST(HostsTest, TheTightestLimitOfTasksHolds) {
  const testing::CgroupTree tree;
  const auto left = [&tree] { return tasks_left(tree.path(), tree.path("membership")); };
  tree.write("membership", "0::/slice/job");
  EXPECT_EQ(left(), std::nullopt);
  tree.write("slice/job/pids.max", "max");
  tree.write("slice/job/pids.current", "7");
  EXPECT_EQ(left(), std::nullopt);
  tree.write("slice/pids.max", "100");
  tree.write("slice/pids.current", "60");
  EXPECT_EQ(left(), 40U);
  tree.write("slice/job/pids.max", "5");  // lowered below what there is
  EXPECT_EQ(left(), 0U);
  tree.write("membership", "3:pids:/job");
  tree.write("pids/job/pids.max", "9");
  tree.write("pids/job/pids.current", "8");
  EXPECT_EQ(left(), 1U);
}

TEST(HostsTest, TheFreezerOfAProcess) {
  const testing::CgroupTree tree;
  const auto is_seven_frozen = [&] { return is_frozen(7, tree.path(), tree.path()); };
  EXPECT_FALSE(is_seven_frozen());
  tree.write("7/cgroup", "6:freezer:/job\n0::/job");
  tree.write("freezer/job/freezer.state", "THAWED");
  tree.write("job/cgroup.events", "populated 1\nfrozen 0");
  EXPECT_FALSE(is_seven_frozen());
  tree.write("job/cgroup.events", "populated 1\nfrozen 1");
  EXPECT_TRUE(is_seven_frozen());
  tree.write("job/cgroup.events", "populated 1\nfrozen 0");
  tree.write("freezer/job/freezer.state", "FROZEN");
  EXPECT_TRUE(is_seven_frozen());
}

// The last rank has the quota.
bool has_cores(const std::vector<std::vector<int>>& allowed, std::optional<double> quota) {
  std::vector<ProcessorGrant> ranks;
  for (const std::vector<int>& processors : allowed) {
    ranks.push_back({processors, std::nullopt});
  }
  ranks.back().quota = quota;
  return has_core_for_every_rank(ranks);
}

TEST(HostsTest, CoresAreCountedOnceOverAllRanks) {
  const std::vector<int> both = {0, 1};
  EXPECT_TRUE(has_cores({both, both}, std::nullopt));
  EXPECT_FALSE(has_cores({both, both, both}, std::nullopt));
  // Pinned to cores of their own, and pinned all to the same.
  EXPECT_TRUE(has_cores({{0}, {1}, {7}}, std::nullopt));
  EXPECT_FALSE(has_cores({{3}, {3}}, std::nullopt));
  EXPECT_TRUE(has_cores({{3}}, std::nullopt));
}

TEST(HostsTest, TheQuotaCapsTheCores) {
  const std::vector<int> four = {0, 1, 2, 3};
  EXPECT_TRUE(has_cores({four, four}, 2.0));
  EXPECT_FALSE(has_cores({four, four}, 1.5));
  EXPECT_FALSE(has_cores({four}, 0.5));
  EXPECT_FALSE(has_cores({four, four, four, four, four}, 64.0));
  EXPECT_FALSE(has_core_for_every_rank({{four, 1.5}, {four, 3.0}}));
}

}  // namespace
}  // namespace pydist
