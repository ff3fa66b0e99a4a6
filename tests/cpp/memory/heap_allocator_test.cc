// Random operations against a model that marks every unit of the heap by hand.

#include "memory/heap_allocator.h"

#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "base/error.h"

namespace pydist {
namespace {

constexpr std::size_t kUnit = 256;

// First fit, unit by unit.
class Model {
 public:
  explicit Model(std::size_t units) : is_used_(units) {}

  std::optional<std::size_t> allocate(std::size_t units) {
    std::size_t run = 0;
    for (std::size_t i = 0; i < is_used_.size(); ++i) {
      run = is_used_[i] ? 0 : run + 1;
      if (run == units) {
        mark(i + 1 - units, units, true);
        return i + 1 - units;
      }
    }
    return std::nullopt;
  }
  void release(std::size_t at, std::size_t units) { mark(at, units, false); }
  [[nodiscard]] std::size_t free_units() const {
    std::size_t free = 0;
    for (const bool used : is_used_) {
      free += used ? 0 : 1;
    }
    return free;
  }

 private:
  void mark(std::size_t at, std::size_t units, bool used) {
    for (std::size_t i = at; i < at + units; ++i) {
      ASSERT_NE(is_used_[i], used);
      is_used_[i] = used;
    }
  }
  std::vector<bool> is_used_;
};

TEST(HeapAllocatorTest, DoesWhatTheModelDoes) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    const std::size_t units = 1 + random() % 60;
    HeapAllocator allocator(units * kUnit + random() % kUnit, kUnit);
    Model model(units);
    struct Taken {
      std::size_t offset;
      std::size_t bytes;
    };
    std::vector<Taken> taken;
    for (int step = 0; step < 2000; ++step) {
      if (taken.empty() || random() % 2 == 0) {
        const std::size_t wanted = random() % (random() % 2 == 0 ? 3 * kUnit : units * kUnit + 9);
        const std::size_t needed = std::max<std::size_t>(1, (wanted + kUnit - 1) / kUnit);
        const auto offset = allocator.allocate(wanted);
        const auto expected = model.allocate(needed);
        ASSERT_EQ(offset.has_value(), expected.has_value()) << seed << " " << step;
        if (offset) {
          ASSERT_EQ(*offset, *expected * kUnit) << seed << " " << step;
          taken.push_back({*offset, wanted});
        }
      } else {
        const std::size_t index = random() % taken.size();
        std::swap(taken[index], taken.back());
        const auto [offset, bytes] = taken.back();
        taken.pop_back();
        allocator.release(offset, bytes);
        model.release(offset / kUnit, std::max<std::size_t>(1, (bytes + kUnit - 1) / kUnit));
      }
      ASSERT_EQ(allocator.free_bytes(), model.free_units() * kUnit) << seed << " " << step;
    }
    for (const auto& [offset, bytes] : taken) {
      allocator.release(offset, bytes);
    }
    // Everything has merged again.
    EXPECT_EQ(allocator.free_bytes(), units * kUnit);
    EXPECT_EQ(allocator.allocate(units * kUnit), 0u);
  }
}

TEST(HeapAllocatorTest, AHeapTooSmallForAnythingGivesNothing) {
  HeapAllocator none(0);
  EXPECT_EQ(none.free_bytes(), 0u);
  EXPECT_FALSE(none.allocate(0).has_value());
  HeapAllocator small(kUnit - 1, kUnit);
  EXPECT_FALSE(small.allocate(1).has_value());
}

TEST(HeapAllocatorTest, NoBytesStillTakeAPlace) {
  HeapAllocator allocator(2 * kUnit, kUnit);
  EXPECT_EQ(allocator.allocate(0), 0u);
  EXPECT_EQ(allocator.allocate(0), kUnit);
  EXPECT_FALSE(allocator.allocate(0).has_value());
  allocator.release(0, 0);
  EXPECT_EQ(allocator.allocate(1), 0u);
}

TEST(HeapAllocatorTest, MoreThanAnAddressCanCountIsRefused) {
  HeapAllocator allocator(64 * kUnit, kUnit);
  constexpr std::size_t kMost = std::numeric_limits<std::size_t>::max();
  for (const std::size_t bytes : {kMost, kMost - 1, kMost - kUnit, kMost / 2, 64 * kUnit + 1}) {
    EXPECT_FALSE(allocator.allocate(bytes).has_value()) << bytes;
    EXPECT_EQ(allocator.free_bytes(), 64 * kUnit) << bytes;
  }
}

TEST(HeapAllocatorTest, AReleaseOfWhatIsFreeIsNoticed) {
  HeapAllocator allocator(8 * kUnit, kUnit);
  ASSERT_EQ(allocator.allocate(2 * kUnit), 0u);
  ASSERT_EQ(allocator.allocate(2 * kUnit), 2 * kUnit);
  allocator.release(0, 2 * kUnit);
  EXPECT_THROW(allocator.release(0, 2 * kUnit), Error);
  EXPECT_THROW(allocator.release(kUnit, kUnit), Error);
  EXPECT_THROW(allocator.release(3 * kUnit, 2 * kUnit), Error);
  EXPECT_EQ(allocator.free_bytes(), 6 * kUnit);
}

}  // namespace
}  // namespace pydist
