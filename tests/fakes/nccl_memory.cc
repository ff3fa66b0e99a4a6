#include "nccl_memory.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "cuda_driver.h"
#include "nccl.h"
#include "nccl_communicator.h"

namespace fake_nccl {
namespace {

std::mutex memory_mutex;
// Guarded by memory_mutex. Never destroyed: the end of a communicator may be under way at exit.
auto& memory = *new std::map<void*, int>;  // how often it is registered
auto& memory_bytes = *new std::map<void*, long>;
auto& registrations = *new std::map<void*, void*>;  // memory by communicator
std::atomic<int> ended_strays{0};                   // how often

// Memory of torch's fake device (tests/fake_cuda) that nobody has any more.
bool is_given_back(const void* data) {
  using Question = int (*)(const void*);
  const auto is_freed = reinterpret_cast<Question>(::dlsym(RTLD_DEFAULT, "fake_cuda_is_freed"));
  return is_freed != nullptr && is_freed(data) != 0;
}

}  // namespace

bool is_registered(void* comm, const void* data) {
  const std::lock_guard lock(memory_mutex);
  return std::any_of(registrations.begin(), registrations.end(), [&](const auto& each) {
    const auto* const begin = static_cast<const char*>(each.first);
    return each.second == comm && data >= begin && data < begin + memory_bytes[each.first];
  });
}

void forget_memory_of(void* comm) {
  const std::lock_guard lock(memory_mutex);
  for (const auto& [data, owner] : registrations) {
    if (owner == comm) {
      memory[data] = 0;
    }
  }
  std::erase_if(registrations, [&](const auto& each) { return each.second == comm; });
}

int times_strays_ended() { return ended_strays; }

void write_late(const std::vector<Output>& outputs) {
  for (const Output& output : outputs) {
    if (is_given_back(output.data)) {
      ++faults_seen;
    }
    std::memset(output.data, 0x5a, output.bytes);
  }
}

}  // namespace fake_nccl

using namespace fake_nccl;

extern "C" {

int ncclMemAlloc(void** data, std::size_t bytes) {
  if (fake_driver_reserve(static_cast<long>(bytes)) == 0) {
    return kUnhandledCudaError;
  }
  *data = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  std::memset(*data, 0xff, bytes);
  const std::lock_guard lock(memory_mutex);
  memory[*data] = 0;
  memory_bytes[*data] = static_cast<long>(bytes);
  return kSuccess;
}

int ncclMemFree(void* data) {
  const std::lock_guard lock(memory_mutex);
  if (memory.count(data) == 0) {
    return kInvalidArgument;
  }
  if (memory[data] != 0) {
    ++faults_seen;  // a communicator would use it for whatever comes to lie there
  }
  memory.erase(data);
  fake_driver_reserve(-memory_bytes[data]);
  memory_bytes.erase(data);
  std::free(data);
  return kSuccess;
}

int ncclCommRegister(void* comm, void* data, std::size_t, void** handle) {
  const CommPtr owner = find(comm);
  if (owner == nullptr) {
    return kInvalidArgument;
  }
  if (has_fault(*owner, "no_register", false)) {
    return kSystemError;
  }
  const std::lock_guard lock(memory_mutex);
  *handle = data;
  ++memory[data];
  registrations[data] = comm;
  return kSuccess;
}

int ncclCommDeregister(void* handle, void* data) {
  const CommPtr comm = find(handle);
  if (comm == nullptr) {
    return kInvalidArgument;
  }
  {
    const std::lock_guard lock(memory_mutex);
    if (const auto found = registrations.find(data);
        found == registrations.end() || found->second != handle) {
      return kInvalidUsage;
    }
  }
  ++comm->calls;
  if (has_fault(*comm, "slow_deregister", false)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }
  --comm->calls;
  const std::lock_guard lock(memory_mutex);
  --memory[data];
  registrations.erase(data);
  return kSuccess;
}

int fake_nccl_registrations() {
  const std::lock_guard lock(memory_mutex);
  return static_cast<int>(registrations.size());
}

int fake_nccl_blocks() {
  const std::lock_guard lock(memory_mutex);
  return static_cast<int>(memory.size());
}

void fake_nccl_end_strays() { ++ended_strays; }
}
