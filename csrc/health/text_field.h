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

// Ended by a zero; cut to fit, between two characters of UTF-8.
template <std::size_t Size>
void write_text(std::array<char, Size>& field, std::string_view text) noexcept {
  std::size_t length = std::min(text.size(), Size - 1);
  const auto is_inside = [&] {
    return (static_cast<unsigned char>(text[length]) & 0xC0U) == 0x80U;
  };
  while (length != 0 && length < text.size() && is_inside()) {
    --length;
  }
  field[text.copy(field.data(), length)] = '\0';
}

// Ends with the field, whatever another process has written there.
template <std::size_t Size>
[[nodiscard]] std::string read_text(const std::array<char, Size>& field) {
  return {field.data(), ::strnlen(field.data(), Size)};
}

}  // namespace pydist
