#include "memory/private_view.h"

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "base/error.h"

namespace pydist {
namespace {

using Ranges = std::vector<PrivateView::Range>;

SharedSegment backed(std::size_t pages) {
  SharedSegment segment = SharedSegment::create("view-test", pages * page_bytes());
  segment.reserve(0, segment.bytes(), "a test");
  return segment;
}

TEST(PrivateViewTest, ShowsWhatOthersWriteIntoTheSegment) {
  const SharedSegment segment = backed(3);
  const PrivateView view(segment);
  ASSERT_NE(view.data(), segment.data());
  ASSERT_EQ(view.bytes(), segment.bytes());
  EXPECT_EQ(view.data()[7], std::byte{0});
  segment.data()[7] = std::byte{42};
  EXPECT_EQ(view.data()[7], std::byte{42});
  EXPECT_EQ(view.written(), Ranges{});  // reading makes no copies
}

TEST(PrivateViewTest, KeepsWhatIsWrittenThroughItToItself) {
  const std::size_t page = page_bytes();
  const SharedSegment segment = backed(9);
  PrivateView view(segment);
  const PrivateView other(segment);
  view.data()[page] = std::byte{1};
  view.data()[3 * page - 1] = std::byte{2};
  view.data()[8 * page + 5] = std::byte{3};
  EXPECT_EQ(segment.data()[page], std::byte{0});
  EXPECT_EQ(other.data()[8 * page + 5], std::byte{0});
  EXPECT_EQ(view.written(), (Ranges{{page, 3 * page}, {8 * page, 9 * page}}));
  EXPECT_EQ(other.written(), Ranges{});
  // The copy of a page stays as it is.
  segment.data()[page + 1] = std::byte{4};
  EXPECT_EQ(view.data()[page + 1], std::byte{0});
  view.forget();
  EXPECT_EQ(view.written(), Ranges{});
  EXPECT_EQ(view.data()[page], std::byte{0});
  EXPECT_EQ(view.data()[page + 1], std::byte{4});
}

TEST(PrivateViewTest, FindsOnePageAmongMany) {
  const std::size_t page = page_bytes();
  const SharedSegment segment = backed(10000);
  PrivateView view(segment);
  view.data()[9999 * page] = std::byte{1};
  view.data()[4096 * page] = std::byte{1};
  view.data()[4095 * page] = std::byte{1};
  EXPECT_EQ(view.written(), (Ranges{{4095 * page, 4097 * page}, {9999 * page, 10000 * page}}));
}

TEST(PrivateViewTest, SharesWhatIsWrittenWhileItIsTold) {
  const SharedSegment segment = backed(2);
  PrivateView view(segment);
  std::byte* const data = view.data();
  data[0] = std::byte{1};
  view.share(true);
  EXPECT_EQ(view.data(), data);
  EXPECT_EQ(data[0], std::byte{0});
  data[1] = std::byte{2};
  EXPECT_EQ(segment.data()[1], std::byte{2});
  EXPECT_EQ(view.written(), Ranges{});
  view.share(false);
  data[2] = std::byte{3};
  EXPECT_EQ(data[1], std::byte{2});
  EXPECT_EQ(segment.data()[2], std::byte{0});
}

TEST(PrivateViewTest, OutlivesWhoeverElseHoldsTheSegment) {
  SharedSegment segment = backed(1);
  segment.data()[0] = std::byte{5};
  PrivateView first(segment);
  segment = SharedSegment();
  first.data()[1] = std::byte{6};
  std::byte* const data = first.data();
  PrivateView second(std::move(first));
  EXPECT_EQ(second.data(), data);
  PrivateView third;
  third = std::move(second);
  EXPECT_EQ(third.data()[0], std::byte{5});
  EXPECT_EQ(third.written(), (Ranges{{0, page_bytes()}}));
  third.forget();
  EXPECT_EQ(third.data()[1], std::byte{0});
}

TEST(PrivateViewTest, AnEmptyOneHoldsNothing) {
  PrivateView nothing;
  EXPECT_EQ(nothing.data(), nullptr);
  EXPECT_EQ(nothing.written(), Ranges{});
  nothing.forget();
  nothing.share(true);
}

TEST(PrivateViewTest, TakesAllPagesForCopiesWhereTheSystemDoesNotTell) {
  const SharedSegment segment = backed(3);
  for (const char* pagemap : {"/nowhere", "/dev/null"}) {
    PrivateView view(segment, pagemap);
    view.data()[page_bytes()] = std::byte{1};
    EXPECT_EQ(view.written(), (Ranges{{0, 3 * page_bytes()}}));
    view.forget();
    EXPECT_EQ(view.data()[page_bytes()], std::byte{0});
  }
}

TEST(PrivateViewTest, AForkedChildHasCopiesOfItsOwn) {
  const SharedSegment segment = backed(2);
  const PrivateView view(segment);
  view.data()[0] = std::byte{1};
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool is_inherited = view.data()[0] == std::byte{1};
    view.data()[page_bytes()] = std::byte{2};
    const bool is_seen = view.written() == Ranges{{0, 2 * page_bytes()}};
    ::_exit(is_inherited && is_seen ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(view.data()[page_bytes()], std::byte{0});
  EXPECT_EQ(view.written(), (Ranges{{0, page_bytes()}}));
}

}  // namespace
}  // namespace pydist
