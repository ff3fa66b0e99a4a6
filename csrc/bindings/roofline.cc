// pydist._native.Roofline: the memory traffic of a collective without its synchronisation.

#include "collectives/roofline.h"

#include "bindings/arguments.h"
#include "bindings/bindings.h"
#include "c10d/tensors.h"

namespace pydist {
namespace {

// Holds the tensors that it addresses.
struct PythonRoofline {
  Roofline roofline;
  at::Tensor input;
  at::Tensor output;
};

std::vector<std::byte*> addresses_of(const Communicator& communicator, const at::Tensor& tensor,
                                     const char* name) {
  if (!tensor.is_contiguous()) {
    throw InvalidUsage(join("Roofline: ", name, " must be contiguous."));
  }
  std::vector<std::byte*> addresses =
      communicator.symmetric_addresses(tensor.const_data_ptr(), tensor.nbytes());
  if (addresses.empty()) {
    throw InvalidUsage(join("Roofline: ", name,
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
  all.inputs = addresses_of(communicator, input, "input");
  all.outputs = addresses_of(communicator, output, "output");
  // In place, each rank's block lies elsewhere in the blocks of all.
  if (input.nbytes() < output.nbytes()) {
    place_blocks(all.inputs, all.outputs, communicator.rank(), input.nbytes());
  } else if (output.nbytes() < input.nbytes()) {
    place_blocks(all.outputs, all.inputs, communicator.rank(), output.nbytes());
  }
  return {Roofline(all), std::move(input), std::move(output)};
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
}

}  // namespace pydist
