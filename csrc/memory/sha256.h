// SHA-256 (FIPS 180-4) and what is made of it here: keyed digests (HMAC, RFC 2104) by which the
// processes of a job know each other.
//
// For short texts: nothing here is fast.

#pragma once

#include <array>
#include <span>
#include <string>
#include <string_view>

namespace pydist {

using Sha256 = std::array<unsigned char, 32>;

[[nodiscard]] Sha256 sha256(std::string_view text);
[[nodiscard]] Sha256 hmac_sha256(std::string_view key, std::string_view text);

[[nodiscard]] std::string to_hex(std::span<const unsigned char> bytes);

// Takes as long whatever the texts are, so that the time tells nobody how much of a guess is right.
[[nodiscard]] bool equal_in_constant_time(std::string_view a, std::string_view b) noexcept;

}  // namespace pydist
