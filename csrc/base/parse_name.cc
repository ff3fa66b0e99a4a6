#include "base/parse_name.h"

#include <algorithm>

#include "base/error.h"

namespace pydist {

void reject_text(std::string_view where, std::string_view text, std::string_view valid) {
  throw InvalidUsage(join(where, "='", text, "' is not valid; use one of: ", valid, "."));
}

std::size_t place_of_name(std::span<const std::string_view> names, std::string_view text,
                          std::string_view where) {
  const auto found = std::find(names.begin(), names.end(), text);
  if (found == names.end()) {
    reject_text(where, text, list_of(names));
  }
  return static_cast<std::size_t>(found - names.begin());
}

std::string list_of(std::span<const std::string_view> names) {
  std::string list;
  for (const std::string_view name : names) {
    list += list.empty() ? "" : ", ";
    list += name;
  }
  return list;
}

}  // namespace pydist
