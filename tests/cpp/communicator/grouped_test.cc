// Operations that are submitted together start all or nothing, whatever the backend
// (communicator.h).

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/interruption.h"
#include "communicator/communicator.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// A rank's communicator, but for what submit() does.
class WithSubmit final : public Communicator {
 public:
  using Submit = std::function<WorkPtr(Communicator& inner, Operation operation)>;

  WithSubmit(CommunicatorPtr inner, Submit submit)
      : inner_(std::move(inner)), submit_(std::move(submit)) {}

  [[nodiscard]] WorkPtr submit(Operation operation) override {
    return submit_(*inner_, std::move(operation));
  }

  [[nodiscard]] int rank() const noexcept override { return inner_->rank(); }
  [[nodiscard]] int size() const noexcept override { return inner_->size(); }
  [[nodiscard]] const std::string& name() const noexcept override { return inner_->name(); }
  [[nodiscard]] Capabilities capabilities() const override { return inner_->capabilities(); }
  [[nodiscard]] std::string why_unsupported(OpKind kind, ReduceOp op, DType dtype) const override {
    return inner_->why_unsupported(kind, op, dtype);
  }
  void check(const Operation& operation) const override { inner_->check(operation); }
  [[nodiscard]] MemoryPtr allocate(std::size_t bytes, Device device) override {
    return inner_->allocate(bytes, device);
  }
  [[nodiscard]] CommunicatorPtr split(const std::vector<int>& ranks) override {
    return inner_->split(ranks);
  }
  [[nodiscard]] milliseconds timeout() const override { return inner_->timeout(); }
  void set_timeout(milliseconds timeout) override { inner_->set_timeout(timeout); }
  void abort(const Error& reason) override { inner_->abort(reason); }
  [[nodiscard]] std::exception_ptr failure() const override { return inner_->failure(); }
  [[nodiscard]] Blame culprit(int rank, std::string cause) const override {
    return inner_->culprit(rank, std::move(cause));
  }
  void shutdown() noexcept override { inner_->shutdown(); }
  [[nodiscard]] std::vector<std::string> whereabouts() const override {
    return inner_->whereabouts();
  }

 private:
  const CommunicatorPtr inner_;
  const Submit submit_;
};

// Submits to `inner`, and throws `error` in place of the submission with that number, from 1 on.
WithSubmit failing_at(CommunicatorPtr inner, int number, std::exception_ptr error) {
  return {std::move(inner),
          [number, error, count = std::make_shared<int>(0)](Communicator& to, Operation operation) {
            if (++*count == number) {
              std::rethrow_exception(error);
            }
            return to.submit(std::move(operation));
          }};
}

// Rank 1 of three cannot start the last operation of a group. Returns what rank 1 threw, and what
// the others learned.
std::vector<ErrorDescription> errors_of_a_group_that_fails_with(const std::exception_ptr& error) {
  std::vector<ErrorDescription> errors(3);
  std::barrier joined(3);
  std::promise<void> has_thrown;
  const std::shared_future<void> thrown(has_thrown.get_future());
  std::atomic<int> still_trying{2};
  run_ranks(3, [&](RankOfTest& self) {
    std::vector<int> values(100'000, 1);
    std::vector<int> message(100'000, 7);
    ErrorDescription& own = errors[static_cast<std::size_t>(self.rank)];
    joined.arrive_and_wait();  // none is still in something that rank 1 fails
    if (self.rank == 1) {
      WithSubmit group = failing_at(self.communicator, 3, error);
      own = error_of([&] {
        static_cast<void>(group.submit_grouped(
            {receive_from(0, 5, message), all_reduce(values), send_to(2, 5, values)}));
      });
      has_thrown.set_value();
      while (still_trying != 0) {
        std::this_thread::sleep_for(milliseconds(1));
      }
      EXPECT_EQ(message, std::vector<int>(100'000, 7));
      EXPECT_EQ(values, std::vector<int>(100'000, 1));
      return;
    }
    if (self.rank == 0) {
      thrown.wait_for(seconds(30));
      own = error_of([&] { self.communicator->submit(send_to(1, 5, values))->wait(); });
    } else {
      // Waits for rank 1 already when that throws, or comes later.
      own = error_of([&] { self.communicator->run(receive_from(1, 5, values)); });
    }
    const ErrorDescription later =
        error_of([&] { self.communicator->submit(all_reduce(values))->wait(); });
    EXPECT_EQ(later.message, own.message);
    --still_trying;
  });
  return errors;
}

TEST(Grouped, WhatCannotAllStartIsUnderWayNowhereAndFailsTheGroup) {
  const auto errors = errors_of_a_group_that_fails_with(
      std::make_exception_ptr(TransportError("No thread is to be had.")));
  EXPECT_EQ(errors[1].kind, ErrorKind::kTransport);
  EXPECT_EQ(errors[1].message, "No thread is to be had.");
  for (const int rank : {0, 2}) {
    const auto& [kind, message, blame] = errors[static_cast<std::size_t>(rank)];
    EXPECT_EQ(kind, ErrorKind::kTransport);
    EXPECT_EQ(message,
              "rank 1 of group 'world' could not start all of the operations that it submitted "
              "together: No thread is to be had.");
    EXPECT_EQ(blame.ranks, std::vector<int>{1});
    EXPECT_NE(blame.pid, 0);
    EXPECT_EQ(blame.cause, "No thread is to be had.");
  }
}

TEST(Grouped, TheCulpritIsWhomTheErrorNames) {
  const auto errors = errors_of_a_group_that_fails_with(
      std::make_exception_ptr(PeerLost("rank 2 has died.", Blame{.ranks = {2}})));
  for (const ErrorDescription& error : errors) {
    EXPECT_EQ(error.kind, ErrorKind::kPeerLost);
    EXPECT_EQ(error.blame.ranks, std::vector<int>{2});
  }
}

TEST(Grouped, AnyExceptionCounts) {
  const auto errors = errors_of_a_group_that_fails_with(std::make_exception_ptr(std::bad_alloc()));
  EXPECT_EQ(errors[1].message, "std::bad_alloc");
  for (const int rank : {0, 2}) {
    EXPECT_EQ(errors[static_cast<std::size_t>(rank)].kind, ErrorKind::kError);
    EXPECT_PRED2(contains, errors[static_cast<std::size_t>(rank)].message, "std::bad_alloc");
    EXPECT_EQ(errors[static_cast<std::size_t>(rank)].blame.ranks, std::vector<int>{1});
  }
}

TEST(Grouped, WhereTheFirstCannotStartTheGroupIsAsItWas) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<int> values(5, 1);
    WithSubmit group =
        failing_at(self.communicator, 1, std::make_exception_ptr(TransportError("No thread.")));
    const ErrorDescription error = error_of(
        [&] { static_cast<void>(group.submit_grouped({all_reduce(values), all_reduce(values)})); });
    EXPECT_EQ(error.kind, ErrorKind::kTransport);
    EXPECT_EQ(group.failure(), nullptr);
    self.communicator->run(all_reduce(values));
    EXPECT_EQ(values, std::vector<int>(5, 2));
  });
}

TEST(Grouped, WhereOneIsRefusedNoneIsSubmitted) {
  run_ranks(2, [](RankOfTest& self) {
    std::vector<int> values(5, 1);
    std::vector<int> shorter(4, 1);
    Operation wrong = all_reduce(values);
    wrong.outputs = {buffer_of(shorter)};
    int submitted = 0;
    WithSubmit group(self.communicator, [&](Communicator& to, Operation operation) {
      ++submitted;
      return to.submit(std::move(operation));
    });
    const ErrorDescription error = error_of([&] {
      static_cast<void>(
          group.submit_grouped({send_to(1 - self.rank, 0, values), all_reduce(values), wrong}));
    });
    EXPECT_EQ(error.kind, ErrorKind::kInvalidUsage);
    EXPECT_EQ(submitted, 0);
    EXPECT_EQ(group.failure(), nullptr);
    self.communicator->run(all_reduce(values));
    EXPECT_EQ(values, std::vector<int>(5, 2));
  });
}

// -- the wait for what has started ----------------------------------------------------------------

std::atomic<bool> has_interrupted{false};

void interrupt_once() {
  if (!has_interrupted.exchange(true)) {
    throw std::runtime_error("Ctrl-C");
  }
}

// Backends whose operations end a while after the group has failed.
TEST(Grouped, TheBuffersAreTheCallersAgainOnceAllThatStartedHasEnded) {
  for (const bool is_interrupted : {false, true}) {
    has_interrupted = !is_interrupted;
    run_ranks(1, [is_interrupted](RankOfTest& self) {
      const auto slow = std::make_shared<Work>();
      std::thread ending;
      WithSubmit group(self.communicator, [&](Communicator& to, Operation /*operation*/) {
        if (ending.joinable()) {
          throw TransportError("No thread.");
        }
        ending = std::thread([&slow, &to] {
          while (to.failure() == nullptr || !has_interrupted) {
            std::this_thread::sleep_for(milliseconds(1));
          }
          std::this_thread::sleep_for(milliseconds(50));
          slow->finish(to.failure());
        });
        return slow;
      });
      set_interruption_check(&interrupt_once);
      const ErrorDescription error =
          error_of([&] { static_cast<void>(group.submit_grouped({barrier(), barrier()})); });
      set_interruption_check(nullptr);
      EXPECT_TRUE(slow->is_completed());
      EXPECT_EQ(error.message, is_interrupted ? "Ctrl-C" : "No thread.");
      ending.join();
    });
  }
}

}  // namespace
}  // namespace pydist::testing
