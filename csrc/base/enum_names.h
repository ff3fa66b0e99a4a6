// Names of enumerators: a table for each enumeration, in its order, which counts from 0.
//
// Sources for CUDA include this: C++17.

#pragma once

#include <array>
#include <cstddef>
#include <string_view>

namespace pydist {

// `unknown` for a value beyond the table, which a byte of another process's memory may hold.
template <typename Enum, std::size_t N>
[[nodiscard]] constexpr std::string_view name_in(const std::array<std::string_view, N>& names,
                                                 Enum value, std::string_view unknown) noexcept {
  const auto index = static_cast<std::size_t>(value);
  return index < N ? names[index] : unknown;
}

}  // namespace pydist
