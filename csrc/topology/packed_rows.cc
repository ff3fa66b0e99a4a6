#include "topology/packed_rows.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "base/error.h"

namespace pydist {
namespace {

// Seven bits a byte, the lowest first; all bytes but the last have the eighth bit.
constexpr unsigned kBits = 7;
constexpr std::size_t kMore = 1U << kBits;

void append_number(std::string& text, std::size_t number) {
  for (; number >= kMore; number >>= kBits) {
    text += static_cast<char>(number % kMore + kMore);
  }
  text += static_cast<char>(number);
}

class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}

  [[nodiscard]] bool is_at_end() const { return at_ == text_.size(); }

  std::size_t number() {
    std::size_t number = 0;
    for (unsigned shift = 0;; shift += kBits) {
      PYDIST_CHECK(at_ < text_.size() && shift < 8 * sizeof number);
      const auto byte = static_cast<unsigned char>(text_[at_++]);
      number |= (byte % kMore) << shift;
      if (byte < kMore) {
        return number;
      }
    }
  }

  std::string bytes(std::size_t count) {
    PYDIST_CHECK(count <= text_.size() - at_);
    at_ += count;
    return text_.substr(at_ - count, count);
  }

 private:
  const std::string& text_;
  std::size_t at_ = 0;
};

}  // namespace

std::string pack_rows(const std::vector<Row>& rows) {
  std::string text;
  if (rows.empty()) {
    return text;
  }
  PYDIST_CHECK(!rows[0].empty());
  append_number(text, rows[0].size());
  Row above(rows[0].size());
  for (const Row& row : rows) {
    PYDIST_CHECK(row.size() == above.size());
    for (std::size_t column = 0; column < row.size(); ++column) {
      const std::string& each = row[column];
      const std::string& last = above[column];
      const auto shared = static_cast<std::size_t>(
          std::mismatch(each.begin(), each.end(), last.begin(), last.end()).first - each.begin());
      append_number(text, shared);
      append_number(text, each.size() - shared);
      text.append(each, shared);
    }
    above = row;
  }
  return text;
}

std::vector<Row> unpack_rows(const std::string& text) {
  std::vector<Row> rows;
  Reader reader(text);
  if (reader.is_at_end()) {
    return rows;
  }
  const std::size_t columns = reader.number();
  PYDIST_CHECK(columns > 0 && columns <= text.size());
  Row row(columns);
  while (!reader.is_at_end()) {
    for (std::string& each : row) {
      const std::size_t shared = reader.number();
      PYDIST_CHECK(shared <= each.size());
      each.resize(shared);
      const std::size_t rest = reader.number();
      each += reader.bytes(rest);
    }
    rows.push_back(row);
  }
  return rows;
}

}  // namespace pydist
