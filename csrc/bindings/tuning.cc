// pydist._native.TunedClass: what the engine has found to be fastest, to show it and to keep it.

#include <pybind11/stl.h>

#include <bit>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/parse_name.h"
#include "bindings/arguments.h"
#include "bindings/bindings.h"
#include "collectives/shared_memory/tuning_candidates.h"
#include "memory/shared_segment.h"
#include "tuning/tuning_table.h"

namespace pydist {
namespace {

// The largest that PYDIST_CHUNK_BYTES may be.
constexpr std::size_t kLargestPieceBytes = std::size_t{16} << 20;

// Bytes of a piece, whether stores stream, and whether ranks read each other's memory in place.
using Way = std::tuple<std::uint32_t, bool, bool>;

struct TunedClass {
  TuningKey key;
  TuningEntry entry;
};

TuningKey key_of(KindArgument kind, const std::string& memory, int ranks, std::size_t bytes,
                 bool sends_too = false) {
  if (ranks < 2 || ranks > 1 << 24) {
    throw InvalidUsage(join("ranks=", ranks, ": must be 2 or more."));
  }
  if (!std::has_single_bit(bytes) || bytes > top_of(kLargestSizeClass)) {
    throw InvalidUsage(
        join("bytes=", bytes, ": must be a power of two, up to 2^", kLargestSizeClass, "."));
  }
  if (kind.kind == OpKind::kRecv ? ranks != 2 : sends_too) {
    throw InvalidUsage(join("kind=", to_string(kind.kind), ", ranks=", ranks,
                            ", sends_too=", sends_too ? "True" : "False",
                            ": messages (recv) are of 2 ranks, and only they may have sends_too."));
  }
  return {kind.kind, parse_name<TunedMemory>(kTunedMemoryNames, memory, "memory"), ranks,
          size_class_of(bytes), sends_too};
}

Choice choice_of(const Way& way) {
  const auto [piece_bytes, streams, in_place] = way;
  if (piece_bytes > kLargestPieceBytes) {
    throw InvalidUsage(
        join("a way in pieces of ", piece_bytes, " bytes: at most ", kLargestPieceBytes, "."));
  }
  return {piece_bytes, streams, in_place};
}

Way way_of(const Choice& choice) { return {choice.piece_bytes, choice.streams, choice.in_place}; }

TunedClass tuned_class(KindArgument kind, const std::string& memory, int ranks, std::size_t bytes,
                       const Way& way, const std::vector<std::pair<Way, double>>& times_us,
                       bool sends_too) {
  TunedClass result{key_of(kind, memory, ranks, bytes, sends_too), {}};
  result.entry.choice = choice_of(way);
  for (const auto& [each, time_us] : times_us) {
    result.entry.times_us.emplace_back(choice_of(each), time_us);
  }
  return result;
}

std::vector<TunedClass> tuning_table() {
  std::vector<TunedClass> classes;
  for (auto& [key, entry] : TuningTable::of_process().entries()) {
    classes.push_back({key, entry});
  }
  return classes;
}

void replace_tuning_table(const std::vector<TunedClass>& classes) {
  std::map<TuningKey, TuningEntry> entries;
  for (const TunedClass& each : classes) {
    entries.insert_or_assign(each.key, each.entry);
  }
  TuningTable::of_process().replace(std::move(entries));
}

std::vector<Way> tuning_candidates(KindArgument kind, const std::string& memory, int ranks,
                                   std::size_t bytes) {
  const Environment environment = Environment::read();
  const TuningLimits limits{round_up(environment.chunk_bytes, page_bytes()), environment.pins_chunk,
                            environment.one_shot_bytes, environment.single_copy};
  std::vector<Way> result;
  for (const Choice& choice : candidates_for(key_of(kind, memory, ranks, bytes), limits)) {
    result.push_back(way_of(choice));
  }
  return result;
}

}  // namespace

void bind_tuning(py::module_& module) {
  py::class_<TunedClass>(
      module, "TunedClass",
      "Collectives or messages that are tuned together, and the way that was the fastest.")
      .def(py::init(&tuned_class), py::arg("kind"), py::arg("memory"), py::arg("ranks"),
           py::arg("bytes"), py::arg("way"), py::arg("times_us"), py::arg("sends_too") = false,
           "Raises pydist.InvalidUsage where a value makes no sense.")
      .def_property_readonly(
          "kind", [](const TunedClass& self) { return std::string(to_string(self.key.kind)); })
      .def_property_readonly(
          "memory", [](const TunedClass& self) { return std::string(to_string(self.key.memory)); },
          "ordinary, converted (elements travel in another type), symmetric or shared.")
      .def_property_readonly("ranks", [](const TunedClass& self) { return self.key.ranks; })
      .def_property_readonly(
          "bytes", [](const TunedClass& self) { return top_of(self.key.size_class); },
          "The most that a rank contributes; more than half of that.")
      .def_property_readonly(
          "sends_too", [](const TunedClass& self) { return self.key.sends_too; },
          "Of messages (recv): whether the receiver sends to their sender, too.")
      .def_property_readonly(
          "way", [](const TunedClass& self) { return way_of(self.entry.choice); },
          "What a rank moves through transit memory, or a lane, at a time, 0 where nothing goes in "
          "pieces; "
          "whether results are stored past the caches; and whether ranks read each other's memory "
          "in place, ordinary memory through the kernel.")
      .def_property_readonly(
          "times_us",
          [](const TunedClass& self) {
            std::vector<std::pair<Way, double>> times;
            for (const auto& [choice, time_us] : self.entry.times_us) {
              times.emplace_back(way_of(choice), time_us);
            }
            return times;
          },
          "Of candidates that were timed: the way, and µs.")
      .def_property_readonly(
          "is_learnt", [](const TunedClass& self) { return self.entry.is_learnt; },
          "By this process, with all candidates to choose from.");
  module.def("tuning_table", &tuning_table, "What this process knows to be fastest.");
  module.def("replace_tuning_table", &replace_tuning_table, py::arg("classes"),
             "Has groups that are made from now on begin with that, and forgets all else.");
  module.def("tuning_candidates", &tuning_candidates, py::arg("kind"), py::arg("memory"),
             py::arg("ranks"), py::arg("bytes"),
             "What there is to choose from under the variables as they are, and where the system "
             "lets ranks read each other's memory, the usual way first; as TunedClass.way.");
}

}  // namespace pydist
