// Rows of texts as one text, which is short where the rows resemble each other: of each text only
// what differs from the same column of the row above is written (front coding). For what many ranks
// say of themselves. Pure.

#pragma once

#include <string>
#include <vector>

namespace pydist {

using Row = std::vector<std::string>;

// All rows have as many columns as the first one, and at least one.
[[nodiscard]] std::string pack_rows(const std::vector<Row>& rows);
// Fails where the text is torn.
[[nodiscard]] std::vector<Row> unpack_rows(const std::string& text);

}  // namespace pydist
