// What people write for one of several names, and what they are told where it is none.

#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace pydist {

// Throws InvalidUsage: "where='text' is not valid; use one of: valid." `where` names the source of
// the text ("PYDIST_BACKEND", "op").
[[noreturn]] void reject_text(std::string_view where, std::string_view text,
                              std::string_view valid);

// The place of `text` among `names`; throws InvalidUsage that lists the names.
[[nodiscard]] std::size_t place_of_name(std::span<const std::string_view> names,
                                        std::string_view text, std::string_view where);

// The enumerator of a name; throws InvalidUsage that lists the valid ones.
template <typename Enum>
[[nodiscard]] Enum parse_name(std::span<const std::string_view> names, std::string_view text,
                              std::string_view where) {
  return static_cast<Enum>(place_of_name(names, text, where));
}

// "first, second, third".
[[nodiscard]] std::string list_of(std::span<const std::string_view> names);

}  // namespace pydist
