// Text in a field of fixed size, as it stands in memory that processes share and in what ranks send
// each other.

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>

namespace pydist {

// What a text ends with that was cut.
inline constexpr std::string_view kEllipsis = "\u2026";

// Ended by a zero, of which the text has none then; cut to fit, between two characters of UTF-8,
// with an ellipsis for the rest.
template <std::size_t Size>
void write_text(std::array<char, Size>& field, std::string_view text) noexcept {
  static_assert(Size > kEllipsis.size());
  const bool fits = text.size() < Size;
  std::size_t length = fits ? text.size() : Size - 1 - kEllipsis.size();
  const auto is_inside = [&] {
    return (static_cast<unsigned char>(text[length]) & 0xC0U) == 0x80U;
  };
  while (!fits && length != 0 && is_inside()) {
    --length;
  }
  char* end = std::replace_copy(text.begin(), text.begin() + length, field.data(), '\0', ' ');
  end = fits ? end : std::copy(kEllipsis.begin(), kEllipsis.end(), end);
  *end = '\0';
}

// Ends with the field, whatever another process has written there.
template <std::size_t Size>
[[nodiscard]] std::string read_text(const std::array<char, Size>& field) {
  return {field.data(), ::strnlen(field.data(), Size)};
}

}  // namespace pydist
