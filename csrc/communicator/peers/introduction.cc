#include "communicator/peers/introduction.h"

#include <cstddef>
#include <exception>

#include "base/error.h"
#include "topology/rendezvous.h"

namespace pydist {
namespace {

// Grows whenever the layout of anything in shared memory changes, or what ranks send to whom, so
// that two builds of one version do not read each other's memory or wait for each other.
constexpr int kSharedLayout = 19;

}  // namespace

std::string Introduction::to_text() const {
  return pack({card.to_text(), settings, token, complaint});
}

Introduction Introduction::from_text(const std::string& text) {
  const std::vector<std::string> parts = unpack(text);
  PYDIST_CHECK(parts.size() == 4);
  return {Card::from_text(parts[0]), parts[1], parts[2], parts[3]};
}

std::string NetworkIntroduction::to_text() const {
  return pack({complaint.empty() ? card.to_text() : "", secret, complaint});
}

NetworkIntroduction NetworkIntroduction::from_text(const std::string& text) {
  const std::vector<std::string> parts = unpack(text);
  PYDIST_CHECK(parts.size() == 3);
  return {parts[0].empty() ? NodeCard() : NodeCard::from_text(parts[0]), parts[1], parts[2]};
}

std::string words_of(const std::string& what) {
  return what.empty() ? "an error without a text" : what;
}

std::string settings_text(const Environment& environment) {
  const auto text_of = [](const std::optional<std::size_t>& value) {
    return value ? join(*value) : std::string();
  };
  return join("layout ", kSharedLayout, " PYDIST_ALGORITHM=", to_string(environment.algorithm),
              " PYDIST_CHUNK_BYTES=", environment.chunk_bytes,
              environment.pins_chunk ? "" : " (by default)",
              " PYDIST_ONE_SHOT_BYTES=", text_of(environment.one_shot_bytes),
              " PYDIST_ROUNDS_FROM=", text_of(environment.rounds_from),
              " PYDIST_ROUNDS_BYTES=", text_of(environment.rounds_bytes),
              " PYDIST_TUNING=", to_string(environment.tuning));
}

std::vector<Introduction> read_introductions(const std::vector<std::string>& texts,
                                             KnownProcesses& processes, const std::string& name) {
  std::vector<Introduction> ranks;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    KnownProcess& process = processes[rank];
    try {
      ranks.push_back(Introduction::from_text(texts[rank]));
    } catch (const std::exception&) {
      throw Mismatch(join("Rank ", processes[0].rank, " can't read how ", process.who(),
                          " introduces itself to group '", name,
                          "': they run different versions of pydist. Install the same one on all "
                          "hosts."),
                     process.blame("runs another version of pydist"));
    }
    process.host = ranks[rank].card.host_name;
    process.pid = ranks[rank].card.pid;
  }
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const Introduction& each = ranks[rank];
    const KnownProcess& process = processes[rank];
    if (!each.complaint.empty()) {
      throw TransportError(join(process.who(), " cannot take part in group '", name,
                                "': ", each.complaint, on_numbers(processes)),
                           process.blame(each.complaint));
    }
    if (each.settings != ranks[0].settings) {
      throw Mismatch(
          join("Rank ", processes[0].rank, " runs with ", ranks[0].settings, ", but rank ",
               process.rank, " with ", each.settings, "; set them alike on all ranks."),
          process.blame(join("has other settings than rank ", processes[0].rank)));
    }
  }
  return ranks;
}

}  // namespace pydist
