#include "communicator/one_copy.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ranks.h"

namespace pydist::testing {
namespace {

TEST(OneCopyTest, AllRanksReadWhatOneWrites) {
  run_ranks(3, [](RankOfTest& self) {
    const OneCopy copy = allocate_one_copy(*self.communicator, 10'000);
    auto* const words = reinterpret_cast<int*>(copy.segment.data());
    words[self.rank] = 10 + self.rank;
    self.communicator->run(barrier());
    for (int rank = 0; rank < self.size; ++rank) {
      EXPECT_EQ(words[rank], 10 + rank);
      EXPECT_EQ(reinterpret_cast<int*>(copy.view.data())[rank], 10 + rank);
    }
    self.communicator->run(barrier());
  });
}

TEST(OneCopyTest, AllRanksHearTheFirstOfSeveralThatFail) {
  std::vector<std::string> told(4);
  run_ranks(4, [&told](RankOfTest& self) {
    // Two of them expect more than rank 0 offers.
    const std::size_t bytes = self.rank == 1 ? 100'000 : self.rank == 3 ? 200'000 : 1'000;
    const ErrorDescription error =
        error_of([&] { static_cast<void>(allocate_one_copy(*self.communicator, bytes)); });
    EXPECT_EQ(error.kind, ErrorKind::kTransport);
    told[static_cast<std::size_t>(self.rank)] = error.message;
    EXPECT_EQ(allocate_one_copy(*self.communicator, 1'000).segment.bytes(), page_bytes());
  });
  EXPECT_EQ(std::set<std::string>(told.begin(), told.end()).size(), 1U);
  EXPECT_PRED2(contains, told[2], join("rank 1: A shared segment has ", page_bytes(), " bytes"));
}

// Sets variables for as long as it lives.
class Variables {
 public:
  void set(const std::string& name, const std::string& value) {
    const char* const before = std::getenv(name.c_str());
    before_.emplace_back(name,
                         before != nullptr ? std::optional<std::string>(before) : std::nullopt);
    ::setenv(name.c_str(), value.c_str(), 1);
  }
  Variables() = default;
  Variables(const Variables&) = delete;
  Variables& operator=(const Variables&) = delete;
  ~Variables() {
    for (const auto& [name, value] : before_) {
      if (value) {
        ::setenv(name.c_str(), value->c_str(), 1);
      } else {
        ::unsetenv(name.c_str());
      }
    }
  }

 private:
  std::vector<std::pair<std::string, std::optional<std::string>>> before_;
};

// The group may be one on gloo, whose operations travel by TCP.
TEST(OneCopyTest, ItsSecretIsNotSentThroughTheGroup) {
  Environment environment = test_environment();
  environment.job_secret = std::string(32, 'g');  // of the group itself
  const auto allocate = [](RankOfTest& self) {
    static_cast<void>(allocate_one_copy(*self.communicator, 1'000));
  };
  Variables variables;
  // No folder can be made there.
  variables.set("XDG_RUNTIME_DIR", "/proc");
  variables.set("TMPDIR", "/proc");
  run_ranks(
      2,
      [&](RankOfTest& self) {
        const ErrorDescription error = error_of([&] { allocate(self); });
        EXPECT_EQ(error.kind, ErrorKind::kTransport);
        EXPECT_PRED2(contains, error.message, "PYDIST_JOB_SECRET");
      },
      environment);
  variables.set("PYDIST_JOB_SECRET", std::string(32, 's'));
  run_ranks(2, allocate, environment);
}

}  // namespace
}  // namespace pydist::testing
