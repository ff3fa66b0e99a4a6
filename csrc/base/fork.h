// Whether this process, or an object in it, comes from another process by fork().
//
// A forked child (a data-loader worker, a notebook launcher's process) has the parent's memory but
// none of its threads, and shares its segments and sockets. Two questions follow:
//
// - May the child use pydist? Not where the parent was amid a job: the child would speak in the
//   parent's name. Where the parent had shut down all of its groups before, or never had one, the
//   child is as good as any other process. GroupAtWork counts the groups.
// - May the child touch an object that it has inherited? It must not wait for threads that do not
//   exist there, nor write into pages by which the parent's peers know the parent. Birth tells.
//
// Thread safe.

#pragma once

#include <atomic>

namespace pydist {

// Held by a group from its creation until it has been shut down. Children that are forked meanwhile
// may not use pydist.
class GroupAtWork {
 public:
  GroupAtWork() noexcept;
  GroupAtWork(const GroupAtWork&) = delete;
  GroupAtWork& operator=(const GroupAtWork&) = delete;
  ~GroupAtWork() { end(); }

  // The group has been shut down. Idempotent.
  void end() noexcept;

 private:
  std::atomic<bool> has_ended_{false};
};

// A member of objects that must know whether they were made in this process.
class Birth {
 public:
  Birth() noexcept;

  // True in a forked descendant of the process that made the object.
  [[nodiscard]] bool is_inherited() const noexcept;

 private:
  unsigned forks_;
};

// A descriptor that forked children do not keep open: a connection that one of them still held
// would not end with the process that made it, and nobody would learn of its death. For as long as
// the object lives; the descriptor is closed after it goes.
class NotInherited {
 public:
  explicit NotInherited(int descriptor);
  NotInherited(const NotInherited&) = delete;
  NotInherited& operator=(const NotInherited&) = delete;
  ~NotInherited();

 private:
  const int descriptor_;
};

// Whether this process was forked while a group was at work.
[[nodiscard]] bool in_forked_child() noexcept;

// Throws InvalidUsage in such a process.
void require_not_forked();

}  // namespace pydist
