#include "base/children_at_exit.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include <sys/wait.h>
#include <unistd.h>

#include "base/error.h"

namespace pydist {
namespace {

using Clock = std::chrono::steady_clock;

// How often the children are looked at.
constexpr std::chrono::milliseconds kLookAtChildren{20};

struct Waiting {
  std::vector<Child> children;
  std::chrono::milliseconds grace;
  EarlierFailure earlier;
  pid_t owner;
};

void say(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::fflush(stderr);
}

std::string how_it_ended(int status) {
  if (WIFSIGNALED(status)) {
    const int number = WTERMSIG(status);
    return join("was killed by signal ", number, " (", ::strsignal(number), ")");
  }
  return join("exited with status ", WEXITSTATUS(status));
}

std::string names_of(const std::vector<Child>& children) {
  std::string names;
  for (const Child& child : children) {
    names += join(names.empty() ? "" : ", ", child.name, " (pid ", child.pid, ")");
  }
  return names;
}

// Takes the children out that have ended; returns the status of the first that ended badly.
std::optional<int> take_ended(std::vector<Child>& children, bool tells) {
  std::optional<int> bad;
  std::erase_if(children, [&](const Child& child) {
    int status = 0;
    const pid_t found = ::waitpid(child.pid, &status, WNOHANG);
    if (found == child.pid && status != 0 && !bad) {
      bad = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
      if (tells) {
        say(join("pydist: ", child.name, " (pid ", child.pid, ") ", how_it_ended(status),
                 "; all ranks end."));
      }
    }
    return found != 0;  // also where somebody else has waited for it
  });
  return bad;
}

void wait(int status, void* argument) {
  auto& [children, grace, earlier, owner] = *static_cast<Waiting*>(argument);
  if (::getpid() != owner) {
    return;  // a forked child, whose siblings these are
  }
  const bool began_badly = status != 0;
  std::optional<Clock::time_point> deadline;
  if (!earlier.words.empty()) {
    say(earlier.words);
  }
  bool has_told = earlier.status != 0;
  if (!began_badly) {
    status = earlier.status;
  }
  if (status != 0) {
    deadline = Clock::now() + grace;
  }
  int next_signal = SIGTERM;
  while (true) {
    const std::optional<int> bad = take_ended(children, /*tells=*/!has_told);
    if (bad) {
      has_told = true;
      if (status == 0) {
        status = *bad;
        deadline = Clock::now() + grace;
      }
    }
    if (children.empty()) {
      break;
    }
    if (deadline && Clock::now() > *deadline) {
      if (next_signal == SIGTERM) {
        say(join("pydist: ", began_badly ? join("rank 0 has ended with status ", status, "; ") : "",
                 names_of(children), " still ran ", std::chrono::duration<double>(grace).count(),
                 " s later: SIGTERM."));
      }
      for (const Child& child : children) {
        ::kill(child.pid, next_signal);
      }
      next_signal = SIGKILL;
      deadline = Clock::now() + grace;
    }
    std::this_thread::sleep_for(kLookAtChildren);
  }
  if (!began_badly && status != 0) {
    ::_exit(status);
  }
}

}  // namespace

void wait_for_children_at_exit(std::vector<Child> children, std::chrono::milliseconds grace,
                               EarlierFailure earlier) {
  // Never deleted: it is read when everything else has ended.
  auto* const waiting = new Waiting{std::move(children), grace, std::move(earlier), ::getpid()};
  if (::on_exit(&wait, waiting) != 0) {
    throw Error(ErrorKind::kError, "the C library takes no more functions that run at exit.");
  }
}

}  // namespace pydist
