// A descriptor by which one thread wakes another one that waits in poll() or epoll_wait().

#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "base/error.h"
#include "memory/file_descriptor.h"

namespace pydist {

// Thread safe.
class EventDescriptor {
 public:
  // Throws TransportError where the system has none left.
  EventDescriptor() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (!fd_) {
      throw system_error("An event descriptor", errno);
    }
  }

  [[nodiscard]] int get() const noexcept { return fd_.get(); }
  // It can be read from now on, until reset().
  void raise() noexcept {
    const std::uint64_t one = 1;
    static_cast<void>(!::write(fd_.get(), &one, sizeof one));
  }
  void reset() noexcept {
    std::uint64_t count = 0;
    static_cast<void>(!::read(fd_.get(), &count, sizeof count));
  }

 private:
  FileDescriptor fd_;
};

}  // namespace pydist
