// Whether this process was forked from one in which the engine was at work.
//
// A forked child (a data-loader worker) has the parent's memory but none of its threads, and
// shares its segments: it must not touch them, nor wait for threads that do not exist there. A
// process forked before the engine did anything is as good as any other.

#pragma once

namespace pydist {

// From now on, children of this process are forked from one in which the engine is at work.
void note_engine_started() noexcept;

[[nodiscard]] bool in_forked_child() noexcept;

// Throws InvalidUsage in a forked child.
void require_not_forked();

}  // namespace pydist
