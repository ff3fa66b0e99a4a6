# What the machine must offer, checked once, and the compile options of every target.
#
# Provides the interface library `pydist_options`.

if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux"
   OR NOT CMAKE_HOST_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|aarch64|arm64)$")
  message(FATAL_ERROR
    "pydist builds on Linux on x86-64 or aarch64, and this is ${CMAKE_SYSTEM_NAME} on "
    "${CMAKE_HOST_SYSTEM_PROCESSOR}: build it on a supported machine or in a Linux container.")
endif()

if(NOT PYDIST_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "PYDIST_CUDA=${PYDIST_CUDA} is not known: set it to AUTO, ON or OFF.")
endif()

include(CheckLanguage)
check_language(CXX)
if(NOT CMAKE_CXX_COMPILER)
  message(FATAL_ERROR
    "No C++ compiler was found: install g++ 11 or later (`apt-get install g++`) or clang 14 or "
    "later, or point the environment variable CXX at one.")
endif()
enable_language(CXX)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(minimum_compiler 11)
elseif(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  set(minimum_compiler 14)
else()
  set(minimum_compiler 0)
endif()
if(minimum_compiler EQUAL 0 OR CMAKE_CXX_COMPILER_VERSION VERSION_LESS minimum_compiler)
  message(FATAL_ERROR
    "pydist needs g++ 11 or later or clang 14 or later, and ${CMAKE_CXX_COMPILER} is "
    "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}: point the environment variable CXX "
    "at a newer compiler.")
endif()
if(NOT CMAKE_SIZEOF_VOID_P EQUAL 8)
  message(FATAL_ERROR
    "pydist needs a 64-bit target, and ${CMAKE_CXX_COMPILER} builds for "
    "${CMAKE_SIZEOF_VOID_P}-byte pointers: point the environment variable CXX at a 64-bit compiler.")
endif()

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

add_library(pydist_options INTERFACE)
target_link_libraries(pydist_options INTERFACE Threads::Threads)
target_compile_options(pydist_options INTERFACE -Wall -Wextra -Wpedantic)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND (PYDIST_BATCHES OR PYDIST_SANITIZE))
  # It takes a source in a batch for a header, and warns of what headers should not declare.
  target_compile_options(pydist_options INTERFACE -Wno-subobject-linkage)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 takes "text" + std::to_string(...) for an overlapping copy (its bug 105651).
  target_compile_options(pydist_options INTERFACE -Wno-restrict)
endif()
if(PYDIST_WERROR)
  target_compile_options(pydist_options INTERFACE -Werror)
endif()

# torch brings the shared libstdc++. A compiler that finds the archive alone would put a second copy
# into the module, and what the two share by name does not fit: the first number that is written to
# a stream ends the process.
function(libstdcxx file result)
  execute_process(COMMAND "${CMAKE_CXX_COMPILER}" "-print-file-name=${file}"
    OUTPUT_VARIABLE path OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT IS_ABSOLUTE "${path}")
    set(path "")
  endif()
  set(${result} "${path}" PARENT_SCOPE)
endfunction()
libstdcxx(libstdc++.a libstdcxx_archive)
libstdcxx(libstdc++.so libstdcxx_shared)
if(libstdcxx_archive AND NOT libstdcxx_shared)
  libstdcxx(libstdc++.so.6 libstdcxx_shared)
  if(NOT libstdcxx_shared)
    message(FATAL_ERROR
      "${CMAKE_CXX_COMPILER} finds ${libstdcxx_archive} and no shared libstdc++, which torch uses: "
      "install it (`apt-get install libstdc++6`) or point the environment variable CXX at a "
      "compiler that finds one.")
  endif()
  target_link_libraries(pydist_options INTERFACE "${libstdcxx_shared}")
endif()

if(PYDIST_SANITIZE)
  string(REPLACE "," ";" sanitizers "${PYDIST_SANITIZE}")
  foreach(sanitizer IN LISTS sanitizers)
    if(NOT sanitizer MATCHES "^(address|undefined|thread)$")
      message(FATAL_ERROR
        "PYDIST_SANITIZE=${PYDIST_SANITIZE} is not known: set it to address, undefined, thread or "
        "address,undefined.")
    endif()
  endforeach()
  if("thread" IN_LIST sanitizers AND "address" IN_LIST sanitizers)
    message(FATAL_ERROR
      "PYDIST_SANITIZE=${PYDIST_SANITIZE} cannot work: the address and thread sanitizers exclude "
      "each other, so build twice.")
  endif()
  # -O1 keeps the instrumented engine quick and its stacks readable; -g1, which has lines and no
  # variables, is all that a stack shows.
  target_compile_options(pydist_options INTERFACE
    -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  foreach(sanitizer IN LISTS sanitizers)
    if(sanitizer STREQUAL "undefined")
      # Not in what is a test itself (the property PYDIST_IS_TEST): it would take twice the time to
      # compile, to find what no user meets. Nor two checks that take a third of the time: a use of a
      # null pointer ends the program with its stack anyway, and AddressSanitizer finds objects that
      # are gone.
      set(sanitizer
        $<$<NOT:$<BOOL:$<TARGET_PROPERTY:PYDIST_IS_TEST>>>:-fsanitize=undefined>
        $<$<NOT:$<BOOL:$<TARGET_PROPERTY:PYDIST_IS_TEST>>>:-fno-sanitize=null,vptr>)
    else()
      set(sanitizer -fsanitize=${sanitizer})
    endif()
    target_compile_options(pydist_options INTERFACE ${sanitizer})
  endforeach()
  target_compile_options(pydist_options INTERFACE
    $<$<NOT:$<BOOL:$<TARGET_PROPERTY:PYDIST_IS_TEST>>>:-O1>)
  target_link_options(pydist_options INTERFACE -fsanitize=${PYDIST_SANITIZE})
  # Such a build is made to run the tests once, so the batches are large.
  set(CMAKE_UNITY_BUILD ON)
  set(CMAKE_UNITY_BUILD_BATCH_SIZE 25)
  if("thread" IN_LIST sanitizers AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # g++ warns that TSan does not model atomic_thread_fence; the code states where it relies on one.
    target_compile_options(pydist_options INTERFACE -Wno-tsan)
  endif()
endif()
