// How the ranks of a native group introduce themselves to each other when they meet.

#pragma once

#include <string>
#include <vector>

#include "base/env.h"
#include "communicator/peers/endpoint.h"
#include "health/known_processes.h"

namespace pydist {

// What the ranks of a group must have in common, and what they tell each other to meet.
struct Introduction {
  Card card;
  std::string settings;  // that must be equal
  std::string token;     // of rank 0: what the keys of the group's segments begin with
  std::string complaint;

  [[nodiscard]] std::string to_text() const;
  [[nodiscard]] static Introduction from_text(const std::string& text);
};

// What the ranks of several hosts tell each other besides.
struct NetworkIntroduction {
  NodeCard card;
  std::string secret;  // of rank 0, where the ranks have no other
  std::string complaint;

  [[nodiscard]] std::string to_text() const;
  [[nodiscard]] static NetworkIntroduction from_text(const std::string& text);
};

// What a complaint says of an error.
[[nodiscard]] std::string words_of(const std::string& what);

// What all ranks must have set alike, in words.
[[nodiscard]] std::string settings_text(const Environment& environment);

// The introductions of all ranks, by rank; `processes`, which are theirs, are completed by them.
// Throws where the ranks cannot make up the group `name`.
[[nodiscard]] std::vector<Introduction> read_introductions(const std::vector<std::string>& texts,
                                                           KnownProcesses& processes,
                                                           const std::string& name);

}  // namespace pydist
