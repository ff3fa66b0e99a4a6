// Our errors on their way through torch.
//
// torch's bindings, its futures and the autograd engine know torch's exceptions and none of ours:
// a pydist::Error that passes through them arrives in Python as a bare RuntimeError. What they do
// know is torch::PyTorchError, which names its Python class when asked; asking happens under the
// GIL, so throwing needs none. Everything that crosses from c10d/ into torch is such an exception.

#pragma once

#include <exception>
#include <utility>

#include "base/error.h"

// A PyObject, without Python's header.
struct _object;

namespace pydist {

// Answers with a borrowed reference to the Python class of an error, which will be made with the
// error's text alone, at once and on the same thread. Called with the GIL held.
using PythonClassLookup = _object* (*)(const Error& error);

// Set once, when the Python module is loaded.
void set_python_class_lookup(PythonClassLookup lookup) noexcept;

// Converts a pydist::Error to the exception that torch's bindings understand; returns others as
// they are.
[[nodiscard]] std::exception_ptr for_torch(const std::exception_ptr& error);

// The pydist error that for_torch() wrapped; anything else comes back unchanged.
[[nodiscard]] std::exception_ptr from_torch(const std::exception_ptr& error);

// As describe(), but of torch's errors without the C++ stack that their text ends with.
[[nodiscard]] ErrorDescription describe_briefly(const std::exception_ptr& error);

// Runs `function`; a pydist::Error that it throws leaves as torch understands it.
template <typename Function>
auto guarded_for_torch(Function&& function) -> decltype(std::forward<Function>(function)()) {
  try {
    return std::forward<Function>(function)();
  } catch (const Error&) {
    std::rethrow_exception(for_torch(std::current_exception()));
  }
}

}  // namespace pydist
