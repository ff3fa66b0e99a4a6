// The error tree in Python: the classes of pydist/errors.py.

#include <array>
#include <string>

#include "bindings/bindings.h"
#include "c10d/errors.h"

namespace pydist {
namespace {

// Looked up when the first error is raised: when this module is loaded, the package is only half
// imported. The references are never given back; the classes live as long as the process.
PyObject* python_class(ErrorKind kind) {
  static std::array<PyObject*, kErrorKindCount> classes{};
  const auto index = static_cast<std::size_t>(kind);
  if (classes[index] == nullptr) {
    try {
      py::object type =
          py::module_::import("pydist.errors").attr(std::string(to_string(kind)).c_str());
      classes[index] = type.release().ptr();
    } catch (const py::error_already_set&) {
      return PyExc_RuntimeError;
    }
  }
  return classes[index];
}

// Tells the class who is to blame: only the text of an error comes through torch. See
// pydist.errors.
PyObject* announce(ErrorKind kind, const std::string& message, const Blame& blame) {
  if (blame != Blame()) {
    try {
      py::tuple ranks(blame.ranks.size());
      for (std::size_t i = 0; i < blame.ranks.size(); ++i) {
        ranks[i] = blame.ranks[i];
      }
      const auto or_none = [](const std::string& text) -> py::object {
        return text.empty() ? py::object(py::none()) : py::object(py::str(text));
      };
      py::module_::import("pydist.errors")
          .attr("_announce")(
              message, ranks, or_none(blame.host),
              blame.pid == 0 ? py::object(py::none()) : py::object(py::int_(blame.pid)),
              or_none(blame.operation), or_none(blame.cause));
    } catch (const std::exception&) {
      // The error itself matters more.
    }
  }
  return python_class(kind);
}

PyObject* announced_class(const Error& error) {
  return announce(error.kind(), error.what(), error.blame());
}

void translate(std::exception_ptr error) {
  try {
    std::rethrow_exception(from_torch(error));
  } catch (const Error& ours) {
    PyErr_SetString(announced_class(ours), ours.what());
  }
}

}  // namespace

py::object python_exception(const std::exception_ptr& error) {
  if (error == nullptr) {
    return py::none();
  }
  const ErrorDescription description = describe(from_torch(error));
  return py::reinterpret_borrow<py::object>(
      announce(description.kind, description.message, description.blame))(description.message);
}

ErrorKind kind_of(const py::error_already_set& error, ErrorKind otherwise) {
  // The root of the tree, kError, comes first and would match them all.
  for (int i = kErrorKindCount - 1; i > 0; --i) {
    const auto kind = static_cast<ErrorKind>(i);
    if (error.matches(python_class(kind))) {
      return kind;
    }
  }
  return otherwise;
}

void bind_errors(py::module_& /*module*/) {
  set_python_class_lookup(&announced_class);
  // For the bindings of every module: torch's raise our errors too, when our backend throws.
  py::register_exception_translator(&translate);
}

}  // namespace pydist
