#include "c10d/gloo/gloo_introduction.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/env.h"
#include "base/error.h"
#include "base/log.h"

namespace pydist {
namespace {

// How long the connections may take.
constexpr std::chrono::seconds kControlPatience{5};

// Plain bytes.
struct Hello {
  ProcessIdentity process;
  GlooControl::Card control{};
};

template <typename Record>
std::vector<Record> gather(GlooChannel& channel, const Record& own, Deadline deadline) {
  std::vector<Record> all(static_cast<std::size_t>(channel.size()));
  channel.all_gather(&own, all.data(), sizeof own, deadline);
  return all;
}

// What keeps a rank from its connections is no error of the group's.
template <typename Function>
bool succeeds(const std::string& group, const Function& function) {
  try {
    function();
    return true;
  } catch (const Error& error) {
    log_line(LogLevel::kInfo,
             join("the ranks of group '", group,
                  "' compare their calls over gloo, which takes longer than over connections of "
                  "their own: ",
                  error.what()));
    return false;
  }
}

}  // namespace

std::vector<ProcessIdentity> introduce_on_gloo(GlooChannel& channel, const std::string& group,
                                               const GlooNode::Place& place, Deadline deadline) {
  const Environment environment = Environment::read();
  Hello own{.process = ProcessIdentity::own(environment.host_id)};
  std::unique_ptr<GlooControl> control;
  succeeds(group, [&] {
    control = std::make_unique<GlooControl>(environment,
                                            GlooNode::of_process(environment.network, place));
    own.control = control->card(own.process.machine);
  });
  std::vector<ProcessIdentity> processes;
  std::vector<GlooControl::Card> cards;
  for (const Hello& each : gather(channel, own, deadline)) {
    processes.push_back(each.process);
    cards.push_back(each.control);
  }
  const Deadline patience = deadline.earlier_of(Deadline::in(kControlPatience));
  const bool is_connected =
      control && succeeds(group, [&] { control->connect(channel.rank(), cards, patience); });
  const std::vector<std::uint8_t> connected =
      gather(channel, static_cast<std::uint8_t>(is_connected), deadline);
  if (std::count(connected.begin(), connected.end(), 0) == 0) {
    channel.use_control(std::move(control));
  }
  return processes;
}

}  // namespace pydist
