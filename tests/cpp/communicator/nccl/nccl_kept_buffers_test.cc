// What becomes of the buffers of operations that outlive their abort: on an NCCL whose kernels go
// on writing (tests/fakes, FAKE_NCCL_FAULT=stray). Memory that was given back too soon would be
// written after it was freed, which AddressSanitizer sees, too.

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../fakes/nccl.h"
#include "communicator/nccl/kept_buffers.h"
#include "communicator/nccl/late_ends.h"
#include "communicator/nccl/nccl_communicator.h"
#include "nccl_fakes.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTimeout{500};
constexpr Patience kLittlePatience{.end = milliseconds(200)};

// Values on a device, as a tensor has them.
struct Values final : BufferOwner {
  [[nodiscard]] std::vector<Block> blocks() const override {
    return {{data.data(), data.size() * sizeof(float)}};
  }

  std::vector<float> data = std::vector<float>(100, 1.0F);
};

class NcclKeptBuffers : public ::testing::Test {
 protected:
  void TearDown() override {
    ::fake_nccl_end_strays();
    EXPECT_TRUE(comes_true([] {
      KeptBuffers::of_process().release();
      return KeptBuffers::of_process().is_empty();
    }));
  }

  // A single rank, with an NCCL that has `faults`.
  template <typename Body>
  static void run_alone(const char* faults, const Body& body) {
    use_fake_cuda();
    const FakeFault fault(faults);
    const Environment environment = with_timeout_of(kTimeout);
    run_ranks(
        1,
        [&](RankOfTest& self) {
          NcclRank rank(self, environment, kLittlePatience);
          body(rank);
        },
        environment);
  }
};

Operation sum_of(const NcclRank& rank, const std::shared_ptr<Values>& values) {
  Operation operation = rank.all_reduce(values->data);
  operation.owner = values;
  return operation;
}

// As a tensor whose collective is under way: held until the work is over, and by nobody else.
WorkPtr submit(const NcclRank& rank, std::shared_ptr<Values> values) {
  WorkPtr work = rank.group->submit(sum_of(rank, values));
  work->on_completion([held = std::move(values)](const Work::Outcome&) {});
  return work;
}

// Submits an operation that times out, and drops everything of it.
std::weak_ptr<Values> drop_after_a_time_out(const NcclRank& rank) {
  auto values = std::make_shared<Values>();
  const std::weak_ptr<Values> watched = values;
  WorkPtr work = submit(rank, std::move(values));
  EXPECT_EQ(error_of([&] { work->wait(); }).kind, ErrorKind::kTimeout);
  return watched;
}

bool is_given_back(const std::weak_ptr<Values>& values) {
  return comes_true([&] { return values.expired(); });
}

TEST_F(NcclKeptBuffers, StayUntilTheGpuIsDoneWithThem) {
  run_alone("stray:0:1", [](const NcclRank& rank) {
    ::testing::internal::CaptureStderr();
    const std::weak_ptr<Values> values = drop_after_a_time_out(rank);
    std::this_thread::sleep_for(milliseconds(300));  // they are asked for meanwhile
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_FALSE(values.expired()) << "a kernel still writes there";
    EXPECT_TRUE(contains(log, " 400 bytes")) << log;
    ::fake_nccl_end_strays();
    EXPECT_TRUE(is_given_back(values));
  });
}

TEST_F(NcclKeptBuffers, StayWhereTheAbortHangs) {
  run_alone("stray:0:1,hang_abort:0:0", [](const NcclRank& rank) {
    const std::weak_ptr<Values> values = drop_after_a_time_out(rank);
    EXPECT_FALSE(values.expired()) << "nobody knows whether a kernel still writes there";
    ::fake_nccl_end_strays();
    EXPECT_TRUE(is_given_back(values));
  });
}

TEST_F(NcclKeptBuffers, StayWhereNoThreadIsThereForTheAbort) {
  run_alone("stray:0:1", [](const NcclRank& rank) {
    auto values = std::make_shared<Values>();
    const std::weak_ptr<Values> watched = values;
    WorkPtr work = submit(rank, std::move(values));
    {
      const NoThreads no_threads;
      rank.group->abort(Aborted("enough"));
      EXPECT_EQ(error_of([&] { work->wait(); }).kind, ErrorKind::kAborted);
      work.reset();
      ::fake_nccl_end_strays();
      EXPECT_FALSE(comes_true(
          [&] {
            KeptBuffers::of_process().release();
            return watched.expired();
          },
          std::chrono::seconds(1)))
          << "there is no thread that could give them back";
    }
    EXPECT_TRUE(is_given_back(watched));
  });
}

TEST_F(NcclKeptBuffers, AreNoneWhereTheAbortEndsTheKernels) {
  run_alone("hang:0:1", [](const NcclRank& rank) {
    ::testing::internal::CaptureStderr();
    EXPECT_TRUE(is_given_back(drop_after_a_time_out(rank)));
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_FALSE(contains(log, "kept until")) << log;
    EXPECT_TRUE(KeptBuffers::of_process().is_empty());
  });
}

TEST_F(NcclKeptBuffers, AreNoneOfWhatSucceeds) {
  run_alone("", [](const NcclRank& rank) {
    auto values = std::make_shared<Values>();
    const std::weak_ptr<Values> watched = values;
    submit(rank, std::move(values))->wait();
    EXPECT_TRUE(is_given_back(watched));
    EXPECT_TRUE(KeptBuffers::of_process().is_empty());
  });
}

// Its caller's stream waits, and what is freed in the order of that stream needs no more.
TEST_F(NcclKeptBuffers, AreNoneOfABlockingCall) {
  run_alone("late:0:1", [](const NcclRank& rank) {
    const auto values = std::make_shared<Values>();
    Operation operation = sum_of(rank, values);
    operation.deadline = Deadline::in(std::chrono::seconds(20));
    rank.group->run(std::move(operation));
    EXPECT_EQ(values.use_count(), 1);
    rank.stream.synchronize();
  });
}

// Another thread aborts while NCCL sets the operation up. Of that a part is on the stream, and the
// caller's stream does not wait for it.
TEST_F(NcclKeptBuffers, AreThoseOfACallThatThrows) {
  for (const bool is_blocking : {true, false}) {
    run_alone("stray:0:1,slow:0:1", [is_blocking](const NcclRank& rank) {
      auto values = std::make_shared<Values>();
      const std::weak_ptr<Values> watched = values;
      std::thread other([&] {
        std::this_thread::sleep_for(milliseconds(100));
        rank.group->abort(Aborted("enough"));
      });
      const auto call = [&] {
        Operation operation = sum_of(rank, values);
        operation.deadline = Deadline::in(std::chrono::seconds(20));
        if (is_blocking) {
          rank.group->run(std::move(operation));
        } else {
          static_cast<void>(rank.group->submit(std::move(operation)));
        }
      };
      EXPECT_EQ(error_of(call).kind, ErrorKind::kAborted);
      values.reset();
      EXPECT_FALSE(watched.expired()) << "a kernel still writes there";
      other.join();
      ::fake_nccl_end_strays();
      EXPECT_TRUE(is_given_back(watched));
    });
  }
}

// What the process keeps, the next job or the end of this one gives back.
TEST_F(NcclKeptBuffers, OutliveTheirGroup) {
  std::weak_ptr<Values> values;
  run_alone("stray:0:1", [&](const NcclRank& rank) { values = drop_after_a_time_out(rank); });
  LateEnds::of_process().join();
  let_go_of_nccl();
  EXPECT_FALSE(values.expired());
  ::fake_nccl_end_strays();
  EXPECT_TRUE(comes_true([&] {
    let_go_of_nccl();
    return values.expired();
  }));
}

// Memory of the group's own, as a bucket of gradients has it.
TEST_F(NcclKeptBuffers, MayLieInMemoryOfTheGroup) {
  run_alone("stray:0:1", [](const NcclRank& rank) {
    MemoryPtr memory = allocate(rank);
    const CommunicatorPtr other = rank.group->split({0});
    const Device device{DeviceType::kCuda, rank.device};
    Operation operation;
    operation.kind = OpKind::kAllReduce;
    operation.inputs = {Buffer{memory->data(), 10, DType::kFloat32, device}};
    operation.outputs = operation.inputs;
    operation.stream = rank.stream.get();
    const WorkPtr work = rank.group->submit(std::move(operation));
    EXPECT_EQ(error_of([&] { work->wait(); }).kind, ErrorKind::kTimeout);
    memory.reset();
    memory = other->allocate(1000, device);
    EXPECT_EQ(::fake_nccl_blocks(), 2) << "a kernel still writes to the first";
    ::fake_nccl_end_strays();
    EXPECT_TRUE(comes_true([&] {
      memory = other->allocate(1000, device);
      return ::fake_nccl_blocks() == 2;  // this one, and the one before
    }));
    other->shutdown();
  });
}

}  // namespace
}  // namespace pydist::testing
