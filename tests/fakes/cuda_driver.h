// What the fake CUDA driver (libcuda.so.1 of the tests) offers beside the driver's own functions,
// to other fakes and to tests. Found with dlsym(RTLD_DEFAULT, ...) once the library is loaded.

#pragma once

#include <cstddef>
#include <functional>

extern "C" {

// Runs `job` behind what `stream` has been given so far; records it where the stream is captured.
void fake_driver_enqueue(void* stream, const std::function<void()>* job);

// Before each job a stream sleeps for a random time of at most so many microseconds.
void fake_driver_delay_us(int longest);

// Capture into a graph: what is put on the stream, and on those that wait for it, is kept instead
// of run.
void fake_driver_begin_capture(void* stream);
// Of the stream that has begun it. Null if a call has broken the capture, or a stream was not
// waited for that has joined it.
void* fake_driver_end_capture(void* stream);
// In as other an order than that of recording as streams, and what they waited for, allow: of what
// may come next, always what was recorded last.
void fake_driver_replay(void* graph, void* stream);
// It must not be under way.
void fake_driver_destroy_graph(void* graph);

// Whether to ask an event is to wait for it, as it does on a thread that another one keeps from the
// driver.
void fake_driver_queries_wait(bool wait);

// Blocks of memory that have been allocated and not freed.
int fake_driver_blocks();

// How much memory all devices together have; no end of it by default.
void fake_driver_limit_memory(std::size_t bytes);
// Takes some for somebody else, or gives it back (bytes < 0). Returns 0 where there is no room.
int fake_driver_reserve(long bytes);

// For a call that asks or allocates: whether the calling thread may make it. Not while anybody
// captures, unless the thread has said that captures are not its own concern
// (cuThreadExchangeStreamCaptureMode); otherwise the capture breaks.
int fake_driver_permits_unsafe_call();

// The first capture that is under way; null where there is none.
const void* fake_driver_capture();

// Whether the stream is part of a capture.
int fake_driver_is_captured(void* stream);
// And whether a call has broken that capture.
int fake_driver_is_broken(void* stream);
// What the stream has been given so far, as an event captures it; negative where it is not part of
// a capture. And makes a stream wait for that, and so a part of the capture: 0 where that capture
// is over.
long fake_driver_captured_point(void* stream);
int fake_driver_join_capture(void* stream, long point);

// Primary contexts that this process has retained, of as many devices.
int fake_driver_contexts();

// Of the calling thread; null where it has none.
const void* fake_driver_current_context();

// Of a stream of the driver's own; null of all others.
const void* fake_driver_context_of(void* stream);

// Whether `job` was recorded, because the stream is captured.
int fake_driver_record(void* stream, const std::function<void()>* job);

// Calls that were made without a current context.
int fake_driver_faults();
}
