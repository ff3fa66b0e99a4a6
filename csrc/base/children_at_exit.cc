#include "base/children_at_exit.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/deadline.h"
#include "base/error.h"

namespace pydist {
namespace {

using std::chrono::milliseconds;

// How often the children are looked at.
constexpr milliseconds kLookAtChildren{20};

std::string how_child_ended(int status) {
  if (WIFSIGNALED(status)) {
    const int number = WTERMSIG(status);
    return join("was killed by signal ", number, " (", ::strsignal(number), ")");
  }
  return join("exited with status ", WEXITSTATUS(status));
}

std::string names_of_children(const std::vector<Child>& children) {
  std::string names;
  for (const Child& child : children) {
    names += join(names.empty() ? "" : ", ", child.name, " (pid ", child.pid, ")");
  }
  return names;
}

// The children of a process that ends. First a thread looks after them, while what else runs at
// exit runs; then the thread that has called exit(). Its members are guarded by the mutex.
class ChildrenAtExit {
 public:
  ChildrenAtExit(std::vector<Child> children, milliseconds grace, const EarlierFailure& earlier)
      : children_(std::move(children)), grace_(grace), status_(earlier.status) {
    if (status_ != 0) {
      begin_grace();
      has_told_ = true;
      tell_line(earlier.words);
    }
  }

  // Until the process calls exit(), or is ended because a child has failed.
  void watch() {
    while (true) {
      {
        const std::lock_guard lock(mutex_);
        if (is_exiting_) {
          return;
        }
        look();
        if (is_over_) {
          return;
        }
      }
      std::this_thread::sleep_for(kLookAtChildren);
    }
  }

  // Within exit(status).
  void wait_at_exit(int status) {
    if (::getpid() != owner_) {
      return;  // a forked child, whose siblings these are
    }
    std::unique_lock lock(mutex_);
    is_exiting_ = true;
    // Of what exit() is given, the kernel tells others the last eight bits.
    own_status_ = status & 0xff;
    if (own_status_ != 0) {
      has_told_ = true;  // children that fail now do so because this process did
      begin_grace();
    }
    while (true) {
      look();
      if (is_over_) {
        break;
      }
      lock.unlock();
      std::this_thread::sleep_for(kLookAtChildren);
      lock.lock();
    }
    if (own_status_ == 0 && status_ != 0) {
      std::fflush(nullptr);  // which _exit leaves out
      ::_exit(status_);
    }
  }

 private:
  void begin_grace() {
    if (deadline_.is_never()) {
      deadline_ = Deadline::in(grace_);
    }
  }

  static void tell_line(const std::string& text) {
    if (!text.empty()) {
      std::fprintf(stderr, "%s\n", text.c_str());
      std::fflush(stderr);
    }
  }

  // Looks once at all children. Whoever has failed is told of once it is known that this process
  // has not failed before, or once the grace is over.
  void look() {
    take_ended_children();
    if (is_exiting_ || deadline_.has_passed()) {
      if (!has_told_ && !failure_.empty()) {
        has_told_ = true;
        tell_line(failure_);
      }
    }
    if (children_.empty() && (is_exiting_ || status_ == 0)) {
      is_over_ = true;
    } else if (deadline_.has_passed()) {
      end_some();
    }
  }

  void take_ended_children() {
    std::erase_if(children_, [this](const Child& child) {
      int status = 0;
      const pid_t found = ::waitpid(child.pid, &status, WNOHANG);
      if (found == child.pid && status != 0 && status_ == 0) {
        status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
        failure_ = join("pydist: ", child.name, " (pid ", child.pid, ") ", how_child_ended(status),
                        "; all ranks end.");
        begin_grace();
      }
      return found != 0;  // also where somebody else has waited for it
    });
  }

  // SIGTERM, SIGKILL after another grace, and after a third one no wait any more.
  void end_some() {
    if (next_signal_ == 0) {
      tell_line(
          join("pydist: ", names_of_children(children_), " can't be ended by SIGKILL: left."));
      is_over_ = true;
      return;
    }
    if (next_signal_ == SIGTERM && !children_.empty()) {
      tell_line(
          join("pydist: ",
               own_status_ != 0 ? join("rank 0 has ended with status ", own_status_, "; ") : "",
               names_of_children(children_), " still ran ",
               std::chrono::duration<double>(grace_).count(), " s later: SIGTERM."));
    }
    has_told_ = true;  // who ends now was told to
    for (const Child& child : children_) {
      ::kill(child.pid, next_signal_);
    }
    if (!is_exiting_) {
      ::kill(owner_, next_signal_);
    }
    next_signal_ = next_signal_ == SIGTERM ? SIGKILL : 0;
    deadline_ = Deadline::in(grace_);
  }

  std::mutex mutex_;
  std::vector<Child> children_;
  const milliseconds grace_;
  const pid_t owner_ = ::getpid();
  // Of the first child that has failed, and of this process.
  int status_ = 0;
  int own_status_ = 0;
  std::string failure_;
  Deadline deadline_ = Deadline::never();
  int next_signal_ = SIGTERM;
  bool has_told_ = false;
  bool is_exiting_ = false;
  bool is_over_ = false;
};

void run_at_exit(int status, void* argument) {
  static_cast<ChildrenAtExit*>(argument)->wait_at_exit(status);
}

// Signals are for the threads of the program.
void watch_without_signals(ChildrenAtExit* children) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread([children] { children->watch(); }).detach();
  } catch (const std::system_error&) {
    // The process has no thread left to start. The children are waited for at exit all the same.
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void wait_for_children_at_exit(std::vector<Child> children, std::chrono::milliseconds grace,
                               const EarlierFailure& earlier) {
  // Never deleted: it is read when everything else has ended. A static pointer, so that a checker
  // of leaks finds it then.
  static ChildrenAtExit* const waiting = new ChildrenAtExit(std::move(children), grace, earlier);
  if (::on_exit(&run_at_exit, waiting) != 0) {
    throw Error(ErrorKind::kError, "the C library takes no more functions that run at exit.");
  }
  watch_without_signals(waiting);
}

}  // namespace pydist
