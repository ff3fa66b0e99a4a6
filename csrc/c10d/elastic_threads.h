// Threads for jobs that may block: a job runs at once, on an idle thread or on a new one.
//
// Jobs here wait for something (a message of gloo's, the GIL, a user's callback that itself waits
// for another job), so a fixed number of threads could deadlock. Idle threads end after a while.
// Where the system gives no more threads, a caller that can fail learns it, with nothing posted; a
// callback, which cannot, runs the job by itself.
//
// Thread safe. Threads are detached and share the state with this object, so neither destruction
// nor the end of the process waits for a job; in a forked child the object starts afresh.

#pragma once

#include <chrono>
#include <functional>
#include <memory>

namespace pydist {

class ElasticThreads {
 public:
  ElasticThreads();
  ElasticThreads(const ElasticThreads&) = delete;
  ElasticThreads& operator=(const ElasticThreads&) = delete;
  ~ElasticThreads() = default;

  // `job` must not throw. Throws TransportError where no thread is to be had; the job is destroyed
  // then, and has not run.
  void post(std::function<void()> job);

  // The same for callers that cannot fail: where no thread is to be had, the job runs here and now.
  // So the caller must hold no lock that the job needs.
  void post_or_run(std::function<void()> job) noexcept;

  // Waits for the jobs under way, but no longer than `patience`; those that come later never run,
  // and are never destroyed. For the end of the interpreter: a job that took the GIL after that
  // would take the process down with it.
  void close(std::chrono::milliseconds patience);

  // The process's own, for callbacks of futures. Never destroyed.
  static ElasticThreads& shared();

 private:
  struct State;

  // False, with `job` left as it is, where there is no thread for it.
  [[nodiscard]] bool try_post(std::function<void()>& job);
  static void serve(State& state);

  std::shared_ptr<State> state_;
};

}  // namespace pydist
