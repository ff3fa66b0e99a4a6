#include "memory/memory_room.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "base/error.h"
#include "cgroup_tree.h"

namespace pydist {
namespace {

TEST(MemoryRoomTest, ThereIsSomeAndNotMoreThanAddresses) {
  const MemoryRoom room = memory_room();
  EXPECT_GT(room.bytes, 0u);
  EXPECT_LT(room.bytes, std::size_t{1} << 56);
  EXPECT_FALSE(room.limited_by.empty());
}

TEST(MemoryRoomTest, TheTightestLimitOfTheCgroupsAboveHolds) {
  const testing::CgroupTree tree;
  const auto room = [&tree] { return memory_room(tree.path(), tree.path("membership")); };
  tree.write("membership", "0::/slice/job");
  EXPECT_EQ(room().limited_by, "the machine's free memory");
  tree.write("slice/job/memory.max", "max");
  tree.write("slice/job/memory.current", "4096");
  tree.write("slice/memory.max", "1048576");
  tree.write("slice/memory.current", "524288");
  EXPECT_EQ(room().bytes, 524288u);
  EXPECT_EQ(room().limited_by, "the memory limit of cgroup /slice");
  tree.write("slice/memory.stat", "anon 1\ninactive_file 262144");
  EXPECT_EQ(room().bytes, 786432u);  // file pages can be dropped
  tree.write("slice/memory.current", "2097152");
  EXPECT_EQ(room().bytes, 0u);
  // Version 1, where other controllers do not count.
  tree.write("membership", "7:cpu:/job\n4:memory:/job");
  tree.write("memory/job/memory.limit_in_bytes", "8192");
  tree.write("memory/job/memory.usage_in_bytes", "6144");
  tree.write("memory/job/memory.stat", "total_inactive_file 1024");
  EXPECT_EQ(room().bytes, 3072u);
}

TEST(MemoryRoomTest, ALittleFits) { EXPECT_NO_THROW(check_memory_room(4096, "a page")); }

TEST(MemoryRoomTest, TooMuchIsRefusedWithTheReason) {
  for (const std::size_t bytes : {std::size_t{1} << 60, std::numeric_limits<std::size_t>::max()}) {
    try {
      check_memory_room(bytes, "an absurd tensor");
      FAIL() << bytes << " bytes were promised";
    } catch (const TransportError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("an absurd tensor"), std::string::npos) << text;
      EXPECT_NE(text.find(std::to_string(bytes >> 10)), std::string::npos) << text;
      EXPECT_NE(text.find(memory_room().limited_by), std::string::npos) << text;
    }
  }
}

TEST(MemoryRoomTest, TheLastBytesStayFree) {
  // As much as there is is too much: the margin is for everybody else.
  EXPECT_THROW(check_memory_room(memory_room().bytes + (std::size_t{1} << 30), "everything"),
               TransportError);
}

}  // namespace
}  // namespace pydist
