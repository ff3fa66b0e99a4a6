// What the fake NCCL (libnccl.so.2 of the tests) tells beside what NCCL does.

#pragma once

extern "C" {

// Calls that NCCL does not forgive: memory freed while a communicator knows it, an abort while
// another thread is inside of a call. And a write to memory that was given back, though a kernel of
// NCCL was still at it.
int fake_nccl_faults();

// Communicators that have been neither destroyed nor aborted. How many this process has made, and
// how many of these it has split off others.
int fake_nccl_communicators();
int fake_nccl_communicators_made();
int fake_nccl_communicators_split();

// Kernels that NCCL would have launched: one for each communicator of a group of calls.
int fake_nccl_launches();

// Blocks of memory that a communicator knows.
int fake_nccl_registrations();

// Operators of communicators' own that have not been destroyed.
int fake_nccl_operators();

// Blocks of memory that have been allocated and not freed.
int fake_nccl_blocks();

// Lets operations that outlive their abort (FAKE_NCCL_FAULT=stray) write, and end.
void fake_nccl_end_strays();
}
