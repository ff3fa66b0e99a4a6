#include "memory/memory_room.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "base/error.h"

namespace pydist {
namespace {

TEST(MemoryRoomTest, ThereIsSomeAndNotMoreThanAddresses) {
  const MemoryRoom room = memory_room();
  EXPECT_GT(room.bytes, 0u);
  EXPECT_LT(room.bytes, std::size_t{1} << 56);
  EXPECT_FALSE(room.limited_by.empty());
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
