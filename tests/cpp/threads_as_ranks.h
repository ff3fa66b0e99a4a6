// Runs one function on several threads, each of which is a rank.

#pragma once

#include <exception>
#include <thread>
#include <vector>

namespace pydist::testing {

// Calls `body(rank)` for every rank in [0, size), each on its own thread, and joins them all.
// Rethrows the error of the lowest rank that threw one.
template <typename Body>
void run_ranks(int size, const Body& body) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&body, &errors, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::exception_ptr& error : errors) {
    if (error) {
      std::rethrow_exception(error);
    }
  }
}

}  // namespace pydist::testing
