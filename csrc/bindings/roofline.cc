// What a machine allows: pydist._native.Roofline, the memory traffic of a collective without its
// synchronisation, and line_handover_ns, how far two ranks' cores are from each other.

#include "collectives/roofline.h"

#include "bindings/arguments.h"
#include "bindings/bindings.h"
#include "c10d/tensors.h"
#include "collectives/line_handover.h"

namespace pydist {
namespace {

// Holds the tensors that it addresses.
struct PythonRoofline {
  Roofline roofline;
  at::Tensor input;
  at::Tensor output;
};

// `name`: the function and its argument.
std::vector<std::byte*> addresses_of(const Communicator& communicator, const at::Tensor& tensor,
                                     const char* name) {
  if (!tensor.is_contiguous()) {
    throw InvalidUsage(join(name, " must be contiguous."));
  }
  std::vector<std::byte*> addresses =
      communicator.symmetric_addresses(tensor.const_data_ptr(), tensor.nbytes());
  if (addresses.empty()) {
    throw InvalidUsage(join(name,
                            " must lie in symmetric memory that all ranks of the group can address "
                            "(symmetric_empty of a native group)."));
  }
  return addresses;
}

// Where `blocks` has this rank's within `wholes`: where all ranks have theirs.
void place_blocks(std::vector<std::byte*>& blocks, const std::vector<std::byte*>& wholes, int rank,
                  std::size_t bytes) {
  const auto me = static_cast<std::size_t>(rank);
  if (blocks[me] != wholes[me] + me * bytes) {
    return;
  }
  for (std::size_t other = 0; other < blocks.size(); ++other) {
    blocks[other] = wholes[other] + other * bytes;
  }
}

std::size_t count_of(OpKind kind, const at::Tensor& input, const at::Tensor& output, int size) {
  switch (kind) {
    case OpKind::kReduceScatter:
    case OpKind::kScatter:
      return static_cast<std::size_t>(output.numel());
    case OpKind::kAllToAll:
      return static_cast<std::size_t>(input.numel()) / static_cast<std::size_t>(size);
    default:
      return static_cast<std::size_t>(input.numel());
  }
}

PythonRoofline make_roofline(const Communicator& communicator, KindArgument kind, at::Tensor input,
                             at::Tensor output, OpArgument op, int root) {
  const std::optional<DType> dtype = dtype_of(input.scalar_type());
  if (!dtype || output.scalar_type() != input.scalar_type()) {
    throw InvalidUsage(
        join("Roofline: input and output must share a type that collectives take; "
             "they are ",
             input.scalar_type(), " and ", output.scalar_type(), "."));
  }
  if (has_op(kind.kind)) {
    require_arithmetic(input, kind.kind, op.op);
  }
  Roofline::Case all;
  all.kind = kind.kind;
  all.dtype = *dtype;
  all.op = op.op;
  all.rank = communicator.rank();
  all.root = root;
  all.count = count_of(kind.kind, input, output, communicator.size());
  all.inputs = addresses_of(communicator, input, "Roofline: input");
  all.outputs = addresses_of(communicator, output, "Roofline: output");
  // In place, each rank's block lies elsewhere in the blocks of all.
  if (input.nbytes() < output.nbytes()) {
    place_blocks(all.inputs, all.outputs, communicator.rank(), input.nbytes());
  } else if (output.nbytes() < input.nbytes()) {
    place_blocks(all.outputs, all.inputs, communicator.rank(), output.nbytes());
  }
  return {Roofline(all), std::move(input), std::move(output)};
}

// Nobody waits that long for a turn, unless the other rank is gone.
constexpr std::chrono::seconds kLongestHandover(10);

double line_handover_ns(const Communicator& communicator, const at::Tensor& lines, int peer,
                        std::uint64_t turns) {
  const std::vector<std::byte*> addresses =
      addresses_of(communicator, lines, "line_handover_ns: lines");
  const auto begin = reinterpret_cast<std::uintptr_t>(addresses.front());
  const int rank = communicator.rank();
  if (peer < 0 || peer >= communicator.size() || peer == rank) {
    throw InvalidUsage(join("line_handover_ns: peer is ", peer, "; another rank of ",
                            communicator.size(), " than this one, ", rank, ", is wanted."));
  }
  if (lines.nbytes() < kHandoverBytes || begin % kHandoverBytes != 0) {
    throw InvalidUsage(join("line_handover_ns: lines needs ", kHandoverBytes,
                            " bytes or more, at a multiple of that; it has ", lines.nbytes(),
                            " at ", begin, "."));
  }
  return time_line_handover(addresses[static_cast<std::size_t>(rank)],
                            addresses[static_cast<std::size_t>(peer)], rank < peer, turns,
                            Deadline::in(kLongestHandover));
}

}  // namespace

void bind_roofline(py::module_& module) {
  py::class_<PythonRoofline>(module, "Roofline",
                             "The reads and writes that a collective on one host can't do without, "
                             "with no rank waiting for another.")
      .def(py::init(&make_roofline), py::arg("communicator"), py::arg("kind"), py::arg("input"),
           py::arg("output"), py::arg_v("op", py::str("sum"), "'sum'"), py::arg("root") = 0,
           "Tensors as the collective takes them, contiguous and symmetric, at the same place on "
           "every rank. 'send' stands for every rank sending to the next one, all at once.")
      .def(
          "run", [](const PythonRoofline& self) { self.roofline.run(); },
          py::call_guard<ReleasedGil>(),
          "This rank's share, once. What the output holds afterwards means nothing while others "
          "are at work on it.");
  module.attr("HANDOVER_BYTES") = kHandoverBytes;
  module.def("line_handover_ns", &line_handover_ns, py::arg("communicator"), py::arg("lines"),
             py::arg("peer"), py::arg("turns"), py::call_guard<ReleasedGil>(),
             "Nanoseconds that a cache line takes from this rank's core to a peer's. Both call it, "
             "at the same time, each on a core of its own. lines: symmetric, 128 bytes or more, "
             "zeros on both. Timeout where the peer does not come within 10 s.");
}

}  // namespace pydist
