// Collectives as state machines that read like straight-line code.
//
// An algorithm is a coroutine that returns Task and waits with `co_await condition`. Where the
// condition holds, the coroutine runs on; where it does not, control returns to whoever drives the
// operation: a waiting caller, or the progress thread, which moves many operations along in turn.
// A Task may await another Task.
//
// A Task has one driver at a time and is not thread safe.

#pragma once

#include <coroutine>
#include <exception>
#include <utility>

#include "health/condition.h"

namespace pydist {

class Execution;

class [[nodiscard]] Task {
 public:
  struct promise_type;
  using Handle = std::coroutine_handle<promise_type>;

  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, {})) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Task() {
    if (handle_) {
      handle_.destroy();
    }
  }

 private:
  friend class Execution;
  explicit Task(Handle handle) noexcept : handle_(handle) {}

  Handle handle_;
};

// A running Task: the point that it has reached, and the condition that it waits for. Must not be
// moved: the task holds its address.
class Execution {
 public:
  explicit Execution(Task task) noexcept;
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  [[nodiscard]] bool is_done() const noexcept { return task_.handle_.done(); }

  // Whether resume() would get anywhere.
  [[nodiscard]] bool is_ready() noexcept { return condition_.holds(); }

  // What the task waits for, unless it is done.
  [[nodiscard]] const Condition& condition() const noexcept { return condition_; }

  // Runs until the next condition that does not hold, or to the end. Rethrows what the task threw.
  // Precondition: is_ready() and not is_done().
  void resume();

 private:
  friend struct Task::promise_type;

  Task task_;
  std::coroutine_handle<> leaf_;
  // Note [Between tasks]: a task that begins or ends another one names it here and returns to
  // resume(), which goes on with it. Handing over directly (symmetric transfer) needs calls in
  // tail position, which compilers make neither at -O0 nor under the address sanitizer: there,
  // every task of a long loop would leave frames on the stack.
  std::coroutine_handle<> next_;
  Condition condition_;
};

struct Task::promise_type {
  Execution* execution = nullptr;
  std::coroutine_handle<> parent;  // null for the outermost
  std::exception_ptr error;

  Task get_return_object() noexcept { return Task(Handle::from_promise(*this)); }
  std::suspend_always initial_suspend() noexcept { return {}; }
  void return_void() noexcept {}
  void unhandled_exception() noexcept { error = std::current_exception(); }

  struct ReturnToParent {
    bool await_ready() noexcept { return false; }
    void await_suspend(Handle handle) noexcept {
      handle.promise().execution->next_ = handle.promise().parent;
    }
    void await_resume() noexcept {}
  };
  ReturnToParent final_suspend() noexcept { return {}; }

  struct WaitForCondition {
    Condition condition;
    bool await_ready() noexcept { return condition.holds(); }
    void await_suspend(Handle handle) noexcept {
      handle.promise().execution->leaf_ = handle;
      handle.promise().execution->condition_ = condition;
    }
    void await_resume() noexcept {}
  };
  WaitForCondition await_transform(Condition condition) noexcept { return {condition}; }

  struct WaitForTask {
    Handle child;
    bool await_ready() noexcept { return false; }
    void await_suspend(Handle parent) noexcept {
      child.promise().parent = parent;
      child.promise().execution = parent.promise().execution;
      parent.promise().execution->next_ = child;
    }
    void await_resume() const {
      if (child.promise().error) {
        std::rethrow_exception(child.promise().error);
      }
    }
  };
  // The awaited Task is a temporary of the full expression `co_await f()`, which outlives it.
  WaitForTask await_transform(Task&& task) noexcept { return {task.handle_}; }
};

inline Execution::Execution(Task task) noexcept : task_(std::move(task)), leaf_(task_.handle_) {
  task_.handle_.promise().execution = this;
}

inline void Execution::resume() {
  next_ = leaf_;
  while (next_) {
    std::exchange(next_, {}).resume();
  }
  if (is_done() && task_.handle_.promise().error) {
    std::rethrow_exception(task_.handle_.promise().error);
  }
}

}  // namespace pydist
