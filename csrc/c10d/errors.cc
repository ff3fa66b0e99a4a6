#include "c10d/errors.h"

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include <atomic>

namespace pydist {
namespace {

std::atomic<PythonClassLookup> python_class_lookup{nullptr};

class TypedTorchError : public torch::PyTorchError {
 public:
  explicit TypedTorchError(const Error& error) : PyTorchError(error.what()), error_(error) {}

  PyObject* python_type() override {
    const PythonClassLookup lookup = python_class_lookup.load();
    PyObject* type = lookup == nullptr ? nullptr : lookup(error_);
    return type == nullptr ? PyExc_RuntimeError : type;
  }

  [[nodiscard]] const Error& error() const noexcept { return error_; }

 private:
  Error error_;
};

}  // namespace

void set_python_class_lookup(PythonClassLookup lookup) noexcept { python_class_lookup = lookup; }

std::exception_ptr for_torch(const std::exception_ptr& error) {
  if (error == nullptr) {
    return nullptr;
  }
  try {
    std::rethrow_exception(error);
  } catch (const Error& ours) {
    return std::make_exception_ptr(TypedTorchError(ours));
  } catch (...) {
    return error;
  }
}

std::exception_ptr from_torch(const std::exception_ptr& error) {
  if (error == nullptr) {
    return nullptr;
  }
  try {
    std::rethrow_exception(error);
  } catch (const TypedTorchError& typed) {
    return make_error(typed.error().kind(), typed.error().what(), typed.error().blame());
  } catch (...) {
    return error;
  }
}

ErrorDescription describe_briefly(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& torchs) {
    return {ErrorKind::kError, torchs.what_without_backtrace(), {}};
  } catch (...) {
    return describe(error);
  }
}

}  // namespace pydist
