// Lines on standard error: "pydist[rank 2 on host a] warning: health: ...". Thread safe; one write
// a line, so that lines of several processes do not mix. PYDIST_LOG sets the least level that is
// printed, for all of pydist and for parts of it.

#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "base/env.h"

namespace pydist {

// The rank that the lines of this process carry; -1 (the default) leaves it out.
void set_log_rank(int rank) noexcept;
void set_log_levels(const LogLevels& levels);

// The part of pydist that a source file belongs to: the innermost folder that it is in.
[[nodiscard]] std::string_view subsystem_of(std::string_view file) noexcept;

// `file` is the caller's, and tells the subsystem.
[[nodiscard]] bool is_logged(LogLevel level, const char* file = __builtin_FILE()) noexcept;
void log_line(LogLevel level, const std::string& text,
              const char* file = __builtin_FILE()) noexcept;

// Runs what nobody can be told of where it fails: then a line says so.
template <typename Function>
void log_errors_of(const Function& function, const char* file = __builtin_FILE()) noexcept {
  try {
    function();
  } catch (const std::exception& error) {
    log_line(LogLevel::kError, error.what(), file);
  }
}

}  // namespace pydist
