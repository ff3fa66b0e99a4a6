#include "ranks.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <utility>

#include "communicator/native/native_communicator.h"
#include "memory_store.h"
#include "time_limit.h"

namespace pydist::testing {
namespace {

// A little before the time limit of the test, which knows nothing of ranks.
std::chrono::seconds run_limit() {
  return std::max(std::chrono::seconds(1), test_limit() - std::chrono::seconds(5));
}

// What the ranks of one run share. Outlives the threads.
struct Run {
  std::mutex mutex;
  std::condition_variable rank_ended;
  int still_running = 0;                       // guarded by mutex
  std::vector<CommunicatorPtr> communicators;  // guarded by mutex; null until joined
  std::vector<std::exception_ptr> errors;      // by rank, each written by its own
};

[[noreturn]] void give_up(Run& run) {
  std::fprintf(stderr, "\nranks hang; where they are:\n");
  for (std::size_t rank = 0; rank < run.communicators.size(); ++rank) {
    if (run.communicators[rank] == nullptr) {
      std::fprintf(stderr, "  rank %zu has ended, or never joined\n", rank);
      continue;
    }
    // Each rank's own view: they may be in different groups.
    for (const std::string& line : run.communicators[rank]->whereabouts()) {
      std::fprintf(stderr, "  seen by rank %zu: %s\n", rank, line.c_str());
    }
  }
  ::raise(SIGALRM);  // the stacks, and the end
  std::_Exit(1);
}

std::vector<std::exception_ptr> run_all(int size, const RankFunction& function,
                                        const Environment& environment, const HostsOfRanks& hosts,
                                        bool joins) {
  Run run;
  run.still_running = size;
  run.communicators.resize(static_cast<std::size_t>(size));
  run.errors.resize(static_cast<std::size_t>(size));
  const auto store = std::make_shared<MemoryStore>();

  const auto play = [&](int rank) {
    const auto index = static_cast<std::size_t>(rank);
    try {
      RankOfTest self{rank, size, store, nullptr, nullptr};
      Environment its = environment;
      if (!hosts.empty()) {
        its.host_id = self.host_id = join("host ", hosts.at(index));
      }
      self.endpoint = std::make_shared<Endpoint>(its);
      if (joins) {
        self.communicator = join_group(self, "world", environment);
        const std::lock_guard lock(run.mutex);
        run.communicators[index] = self.communicator;
      }
      try {
        function(self);
      } catch (...) {
        run.errors[index] = std::current_exception();
        if (self.communicator) {
          self.communicator->shutdown();
        }
      }
      const std::lock_guard lock(run.mutex);
      run.communicators[index] = nullptr;
    } catch (...) {
      run.errors[index] = std::current_exception();
    }
    const std::lock_guard lock(run.mutex);
    --run.still_running;
    run.rank_ended.notify_all();
  };

  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back(play, rank);
  }
  {
    std::unique_lock lock(run.mutex);
    if (!run.rank_ended.wait_for(lock, run_limit(), [&run] { return run.still_running == 0; })) {
      give_up(run);
    }
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return run.errors;
}

}  // namespace

Environment test_environment() {
  Environment environment;
  environment.timeout = test_limit() / 2;
  return environment;
}

CommunicatorPtr join_group(const RankOfTest& rank, const std::string& name,
                           const Environment& environment) {
  NativeOptions options{name, environment};
  if (rank.host_id) {
    options.environment.host_id = rank.host_id;
    options.address = "127.0.0.1";
  }
  return create_native_communicator(rank.store, rank.rank, rank.size, options, {rank.endpoint});
}

void run_ranks(int size, const RankFunction& function, const Environment& environment,
               const HostsOfRanks& hosts) {
  PYDIST_CHECK(size > 0);
  const auto errors = collect_errors(size, function, environment, hosts);
  for (int rank = 0; rank < size; ++rank) {
    if (const auto& error = errors[static_cast<std::size_t>(rank)]) {
      ADD_FAILURE() << "rank " << rank << " threw: " << describe(error).message;
    }
  }
}

std::vector<std::exception_ptr> collect_errors(int size, const RankFunction& function,
                                               const Environment& environment,
                                               const HostsOfRanks& hosts) {
  return run_all(size, function, environment, hosts, /*joins=*/true);
}

std::vector<std::exception_ptr> run_threads(int size, const RankFunction& function,
                                            const Environment& environment,
                                            const HostsOfRanks& hosts) {
  return run_all(size, function, environment, hosts, /*joins=*/false);
}

ErrorDescription error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (...) {
    return describe(std::current_exception());
  }
  ADD_FAILURE() << "nothing was thrown";
  return {ErrorKind::kError, "nothing was thrown"};
}

NoThreads::NoThreads() : usual_bytes_(0) {
  pthread_attr_t attributes;
  ::pthread_getattr_default_np(&attributes);
  ::pthread_attr_getstacksize(&attributes, &usual_bytes_);
  ::pthread_attr_setstacksize(&attributes, std::size_t{1} << 47);
  EXPECT_EQ(::pthread_setattr_default_np(&attributes), 0);
  ::pthread_attr_destroy(&attributes);
}

NoThreads::~NoThreads() {
  pthread_attr_t attributes;
  ::pthread_getattr_default_np(&attributes);
  ::pthread_attr_setstacksize(&attributes, usual_bytes_);
  EXPECT_EQ(::pthread_setattr_default_np(&attributes), 0);
  ::pthread_attr_destroy(&attributes);
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace pydist::testing
