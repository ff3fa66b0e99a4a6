# The torch installed beside the build's Python: imported targets by path.
#
# torch's own CMake package is not used: on a CUDA wheel it demands a CUDA toolkit and links
# libtorch_cuda, while one build of pydist serves the CPU and the CUDA wheel of the same torch minor.
#
# Needs Python_EXECUTABLE, PYDIST_TORCH_MINIMUM, PYDIST_TORCH_BELOW. Provides
#   TorchWheel_VERSION  full version, such as 2.13.0+cpu
#   TorchWheel_MINOR    major.minor, such as 2.13
#   TorchWheel::Torch   headers (torch's, and its copy of pybind11) and libraries
# Nothing is cached: each configuration asks again, so a changed torch is noticed.

set(torch_wanted "torch ${PYDIST_TORCH_MINIMUM} or later and below ${PYDIST_TORCH_BELOW}")

execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/../installed_torch.py"
  OUTPUT_VARIABLE torch_answer
  ERROR_VARIABLE torch_error
  RESULT_VARIABLE torch_result
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT torch_result EQUAL 0)
  message(FATAL_ERROR
    "The torch of ${Python_EXECUTABLE} is broken: reinstall ${torch_wanted}.\n${torch_error}")
endif()
if(NOT torch_answer)
  message(FATAL_ERROR
    "pydist is compiled against the torch that it will run with, and ${Python_EXECUTABLE} has "
    "none that this build can see: install ${torch_wanted} there, then run "
    "`pip install --no-build-isolation .`.")
endif()

list(GET torch_answer 0 torch_root)
list(GET torch_answer 1 TorchWheel_VERSION)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" TorchWheel_MINOR "${TorchWheel_VERSION}")
if(TorchWheel_MINOR VERSION_LESS PYDIST_TORCH_MINIMUM
   OR TorchWheel_MINOR VERSION_GREATER_EQUAL PYDIST_TORCH_BELOW)
  message(FATAL_ERROR
    "pydist ${PYDIST_VERSION} does not support torch ${TorchWheel_VERSION}, which "
    "${Python_EXECUTABLE} has: install ${torch_wanted}.")
endif()

foreach(torch_file IN ITEMS
    include/torch/csrc/distributed/c10d/Backend.hpp include/pybind11/pybind11.h
    lib/libc10.so lib/libtorch_cpu.so lib/libtorch.so lib/libtorch_python.so)
  if(NOT EXISTS "${torch_root}/${torch_file}")
    message(FATAL_ERROR
      "The torch ${TorchWheel_VERSION} in ${torch_root} lacks ${torch_file}: reinstall torch from "
      "its official wheel.")
  endif()
endforeach()

if(NOT TARGET TorchWheel::Torch)
  add_library(TorchWheel::Torch INTERFACE IMPORTED)
  target_include_directories(TorchWheel::Torch SYSTEM INTERFACE
    "${torch_root}/include" "${torch_root}/include/torch/csrc/api/include")
  foreach(torch_library IN ITEMS torch_python torch torch_cpu c10)
    add_library(TorchWheel::${torch_library} SHARED IMPORTED)
    set_target_properties(TorchWheel::${torch_library} PROPERTIES
      IMPORTED_LOCATION "${torch_root}/lib/lib${torch_library}.so")
    target_link_libraries(TorchWheel::Torch INTERFACE TorchWheel::${torch_library})
  endforeach()
endif()
message(STATUS "torch ${TorchWheel_VERSION} in ${torch_root}")
