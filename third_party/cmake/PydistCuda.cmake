# The CUDA compiler, where there is one, and what the kernel library is compiled for.
#
# Needs PYDIST_CUDA. Provides
#   PYDIST_HAS_CUDA      whether the kernel library is built
#   PYDIST_CUDA_TARGETS  for what: such as "75-virtual 75-real 80-real"
#   PYDIST_CUDA_FLAGS    nvcc's flags for these
# No CUDA toolkit is looked for: nvcc brings its own runtime, which is linked statically.

set(PYDIST_CUDA_ARCHITECTURES "75;80;86;89;90;100;110;120" CACHE STRING
    "CUDA architectures with machine code of their own; what nvcc does not know is left out")

set(PYDIST_HAS_CUDA FALSE)
set(PYDIST_CUDA_TARGETS "")
if(PYDIST_CUDA STREQUAL "OFF")
  return()
elseif(PYDIST_CUDA STREQUAL "AUTO" AND NOT PYDIST_BUILD_PYTHON)
  # The engine and its tests do without; looking for a compiler takes seconds.
  return()
endif()

# Where toolkits install it without touching PATH.
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(PYDIST_NVCC nvcc
               PATHS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" /usr/local/cuda/bin)
  if(PYDIST_NVCC)
    set(ENV{CUDACXX} "${PYDIST_NVCC}")
  endif()
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(PYDIST_CUDA STREQUAL "ON")
    message(FATAL_ERROR
      "PYDIST_CUDA=ON was asked for, but no nvcc was found that works with the C++ compiler: "
      "install the CUDA toolkit, point the environment variable CUDACXX at its nvcc and CUDAHOSTCXX "
      "at a C++ compiler that it supports, or configure with -DPYDIST_CUDA=AUTO or OFF.")
  endif()
  message(STATUS "no usable nvcc: the CUDA kernels are left out")
  return()
endif()

# Each target is named by the flags below.
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_ID STREQUAL "NVIDIA" AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 11.7)
  # The first that passes kernels' arguments as __grid_constant__ on all of the targets.
  if(PYDIST_CUDA STREQUAL "ON")
    message(FATAL_ERROR
      "PYDIST_CUDA=ON was asked for, but ${CMAKE_CUDA_COMPILER} is "
      "${CMAKE_CUDA_COMPILER_VERSION}, and pydist needs 11.7 or later.")
  endif()
  message(STATUS "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old: the CUDA kernels are left out")
  return()
endif()

execute_process(
  COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-arch
  OUTPUT_VARIABLE known
  ERROR_VARIABLE list_error
  RESULT_VARIABLE list_result)
string(REGEX MATCHALL "compute_[0-9]+" known "${known}")
list(TRANSFORM known REPLACE "compute_" "")
set(architectures "")
foreach(architecture IN LISTS PYDIST_CUDA_ARCHITECTURES)
  if(architecture IN_LIST known)
    list(APPEND architectures ${architecture})
  endif()
endforeach()
if(NOT list_result EQUAL 0 OR NOT architectures)
  message(FATAL_ERROR
    "${CMAKE_CUDA_COMPILER} knows none of PYDIST_CUDA_ARCHITECTURES=${PYDIST_CUDA_ARCHITECTURES}, "
    "only ${known}: choose among these, or configure with -DPYDIST_CUDA=OFF.\n${list_error}")
endif()

# The kernels need nothing that only newer architectures have, so the PTX of the oldest serves all:
# most of the compiler's work is done once, and it runs on whatever comes later.
list(SORT architectures COMPARE NATURAL)
list(GET architectures 0 oldest)
set(PYDIST_CUDA_TARGETS "${oldest}-virtual")
set(codes "compute_${oldest}")
foreach(architecture IN LISTS architectures)
  string(APPEND PYDIST_CUDA_TARGETS " ${architecture}-real")
  string(APPEND codes ",sm_${architecture}")
endforeach()
set(PYDIST_CUDA_FLAGS "--generate-code=arch=compute_${oldest},code=[${codes}]")
set(PYDIST_HAS_CUDA TRUE)
list(JOIN architectures " " architectures)
message(STATUS
  "CUDA kernels by nvcc ${CMAKE_CUDA_COMPILER_VERSION} for ${architectures}, and PTX for the rest")
