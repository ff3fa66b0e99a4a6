// Arguments of the collectives as they come from Python, without copies where the call is hot.

#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/error.h"
#include "base/op_kind.h"
#include "base/reduce_op.h"
#include "health/known_processes.h"

namespace pydist {

// Borrowed from the caller's argument, which outlives the call.
struct TensorArgument {
  const at::Tensor* tensor = nullptr;
};

// One tensor that holds a block for each rank, or one tensor for each rank.
struct TensorsArgument {
  std::vector<at::Tensor> tensors;
};

struct OpArgument {
  ReduceOp op = ReduceOp::kSum;
};

struct KindArgument {
  OpKind kind = OpKind::kBarrier;
};

struct TagArgument {
  std::uint64_t tag = 0;
};

// Processes of ranks: each by its number in the group that theirs is made of, its host, pid, start
// in ticks, and whether it runs on this machine.
using ProcessTuples = std::vector<std::tuple<int, std::string, int, std::uint64_t, bool>>;
[[nodiscard]] KnownProcesses known_processes(const ProcessTuples& tuples);

// "sum", "mean" (or "avg"), ...; throws InvalidUsage that lists the valid ones.
[[nodiscard]] ReduceOp parse_reduce_op(std::string_view text);
// "all_reduce", ...
[[nodiscard]] OpKind parse_kind(std::string_view text);

}  // namespace pydist

namespace pybind11::detail {

template <>
struct type_caster<pydist::TensorArgument> {
  PYBIND11_TYPE_CASTER(pydist::TensorArgument, const_name("torch.Tensor"));

  bool load(handle source, bool /*convert*/) {
    if (!THPVariable_Check(source.ptr())) {
      return false;
    }
    value.tensor = &THPVariable_Unpack(source.ptr());
    return true;
  }
};

template <>
struct type_caster<pydist::TensorsArgument> {
  PYBIND11_TYPE_CASTER(pydist::TensorsArgument,
                       const_name("torch.Tensor | collections.abc.Sequence[torch.Tensor]"));

  bool load(handle source, bool /*convert*/) {
    if (THPVariable_Check(source.ptr())) {
      value.tensors = {THPVariable_Unpack(source.ptr())};
      return true;
    }
    if (!PyList_Check(source.ptr()) && !PyTuple_Check(source.ptr())) {
      return false;
    }
    const auto items = reinterpret_borrow<sequence>(source);
    value.tensors.reserve(items.size());
    for (const handle item : items) {
      if (!THPVariable_Check(item.ptr())) {
        return false;
      }
      value.tensors.push_back(THPVariable_Unpack(item.ptr()));
    }
    return true;
  }
};

template <typename Argument, auto Parse>
struct text_argument_caster {
  PYBIND11_TYPE_CASTER(Argument, const_name("str"));

  bool load(handle source, bool /*convert*/) {
    Py_ssize_t size = 0;
    const char* const text =
        PyUnicode_Check(source.ptr()) ? PyUnicode_AsUTF8AndSize(source.ptr(), &size) : nullptr;
    if (text == nullptr) {
      PyErr_Clear();
      throw pydist::InvalidUsage(pydist::join(
          "Expected the name of an operator or of an operation, such as \"sum\", got a ",
          Py_TYPE(source.ptr())->tp_name, "."));
    }
    value = Argument{Parse(std::string_view(text, static_cast<std::size_t>(size)))};
    return true;
  }
};

template <>
struct type_caster<pydist::OpArgument>
    : text_argument_caster<pydist::OpArgument, &pydist::parse_reduce_op> {};

template <>
struct type_caster<pydist::KindArgument>
    : text_argument_caster<pydist::KindArgument, &pydist::parse_kind> {};

template <>
struct type_caster<pydist::TagArgument> {
  PYBIND11_TYPE_CASTER(pydist::TagArgument, const_name("typing.SupportsIndex"));

  bool load(handle source, bool /*convert*/) {
    const auto number = PyIndex_Check(source.ptr()) != 0
                            ? reinterpret_steal<object>(PyNumber_Index(source.ptr()))
                            : object();
    if (!number) {
      PyErr_Clear();
      return false;
    }
    int overflow = 0;
    const long long tag = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    if (overflow != 0 || tag < 0) {
      throw pydist::InvalidUsage(
          pydist::join("A tag must be from 0 to 2**63 - 1, got ", std::string(str(source)), "."));
    }
    value.tag = static_cast<std::uint64_t>(tag);
    return true;
  }
};

}  // namespace pybind11::detail
