// Lines on standard error: "pydist[rank 2] warning: ...". Thread safe; one write a line, so that
// lines of several processes do not mix. PYDIST_LOG sets the least level that is printed.

#pragma once

#include <string>

#include "base/env.h"

namespace pydist {

// The rank that the lines of this process carry; -1 (the default) leaves it out.
void set_log_rank(int rank) noexcept;
void set_log_level(LogLevel level) noexcept;
[[nodiscard]] bool is_logged(LogLevel level) noexcept;

void log_line(LogLevel level, const std::string& text) noexcept;

}  // namespace pydist
