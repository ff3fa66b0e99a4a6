#include "communicator/peers/endpoint.h"

#include <gtest/gtest.h>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <exception>
#include <fstream>
#include <string>

#include "base/interruption.h"
#include "ranks.h"

namespace pydist::testing {
namespace {

using std::chrono::seconds;

Trust trust() { return {random_token(), JobSecret::random()}; }

TEST(EndpointTest, IsWholeAfterItHadNoThread) {
  Endpoint endpoint(test_environment());
  Endpoint other(test_environment());
  const Card card = other.card();
  const Trust common = trust();
  const auto offers = other.receive(common);
  {
    const NoThreads no_threads;
    EXPECT_THROW(static_cast<void>(endpoint.card()), std::exception);
    EXPECT_THROW(static_cast<void>(endpoint.meet(card, common, Deadline::in(seconds(20)))),
                 std::exception);
  }
  const PeerPtr peer = endpoint.meet(card, common, Deadline::in(seconds(20)));
  EXPECT_FALSE(peer->has_crashed());
  const auto own_offers = endpoint.receive(common);
  EXPECT_NE(other.meet(endpoint.card(), common, Deadline::in(seconds(20))), nullptr);
}

TEST(EndpointTest, NobodyElseCanWriteThePage) {
  Endpoint endpoint(test_environment());
  const Card card = endpoint.card();
  const Trust common = trust();
  const auto offers = endpoint.receive(common);
  const FetchedSegment page =
      fetch_segment(card.address, join(common.token, "/page of ", card.address), common.secret,
                    Deadline::in(seconds(20)));
  const std::size_t bytes = round_up(sizeof(ProcessPage), page_bytes());
  void* const writable =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, page.fd.get(), 0);
  EXPECT_EQ(writable, MAP_FAILED);
  const char byte = 1;
  EXPECT_LT(::pwrite(page.fd.get(), &byte, 1, 0), 0);
  // Nor by opening it anew.
  std::ofstream reopened(join("/proc/self/fd/", page.fd.get()), std::ios::in | std::ios::out);
  EXPECT_FALSE(reopened.put(byte).flush().good());
  // The owner goes on.
  const auto ticket = endpoint.page().journal.begin(1, 2, 3, 4, "label");
  endpoint.page().journal.finish(ticket, JournalState::kSucceeded);
  EXPECT_EQ(endpoint.page().journal.read().size(), 1U);
}

// A process whose card is there, and which dies before it is met, while one that it forked holds
// its socket.
TEST(EndpointTest, AStrangerThatDiesIsNotWaitedFor) {
  int channel[2];
  ASSERT_EQ(::pipe(channel), 0);
  const pid_t owner = ::fork();
  if (owner == 0) {
    const SegmentServer server;
    const pid_t heir = ::fork();
    if (heir == 0) {
      ::alarm(30);
      ::pause();
      ::_exit(0);
    }
    const std::string told = join(server.address(), " ", heir, "\n");
    static_cast<void>(::write(channel[1], told.data(), told.size()));
    ::pause();
    ::_exit(0);
  }
  std::string told;
  for (char letter = 0; letter != '\n';) {
    ASSERT_EQ(::read(channel[0], &letter, 1), 1);
    told += letter;
  }
  ::close(channel[0]);
  ::close(channel[1]);
  const auto space = told.find(' ');
  Endpoint endpoint(test_environment());
  Card card = endpoint.card();
  card.address = told.substr(0, space);
  card.pid = owner;
  const pid_t heir = std::stoi(told.substr(space + 1));
  std::thread killer([owner] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    ::kill(owner, SIGKILL);
  });
  const auto before = Deadline::Clock::now();
  const ErrorDescription error =
      error_of([&] { static_cast<void>(endpoint.meet(card, trust(), Deadline::in(seconds(50)))); });
  EXPECT_LT(Deadline::Clock::now() - before, seconds(5 * kSlowdown));
  EXPECT_EQ(error.kind, ErrorKind::kPeerLost);
  EXPECT_PRED2(contains, error.message, join("pid ", owner));
  killer.join();
  ::kill(heir, SIGKILL);
  ::waitpid(owner, nullptr, 0);
}

}  // namespace
}  // namespace pydist::testing
