// What other test libraries (a fake NCCL, say) may ask of the fake CUDA device: a C interface,
// found with dlsym(RTLD_DEFAULT, ...) once the module is loaded.

#pragma once

#include <cstddef>

extern "C" {

// Runs `job(argument)` after everything that `stream` has been given so far; `stream` is the native
// handle of one of the device's streams. Null stands for the default stream of device 0.
void fake_cuda_enqueue(void* stream, void (*job)(void* argument), void* argument);

// Waits until the stream has done everything that it has been given so far.
void fake_cuda_synchronize(void* stream);

// A stream waits for an event of the driver's; counted as torch's own waits are.
void fake_cuda_note_wait(void* stream);

// Whether memory of a device has been freed; unknown once much more has been.
int fake_cuda_is_freed(const void* data);

// The functions of the CUDA runtime that pydist looks for. The first two keep count of the bytes,
// and of the device that was current; the last tells the error of a call that was refused, once.
int cudaHostRegister(void* data, std::size_t bytes, unsigned flags);
int cudaHostUnregister(void* data);
int cudaGetLastError();
}
