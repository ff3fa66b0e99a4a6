// What several reducers do at the end of one backward, so that their ranks never wait in a circle.
//
// A loss may come from several wrapped models, whose backwards begin and end in another order on
// each rank. So first all of them launch what they have left, then all say how it went, which makes
// nobody wait, and only then does one after the other wait, in an order that is the same
// everywhere.

#pragma once

#include <cstdint>
#include <memory>

namespace pydist {

class EndingBackward {
 public:
  EndingBackward() = default;
  EndingBackward(const EndingBackward&) = delete;
  EndingBackward& operator=(const EndingBackward&) = delete;
  virtual ~EndingBackward() = default;

  // The same on every rank, for one and the same model.
  [[nodiscard]] virtual std::uint64_t place() const = 0;
  // Waits for nobody who is still in an earlier step. Throws nothing.
  virtual void close() noexcept = 0;
  // Throws what went wrong since the beginning. `is_alone`: no other reducer ends with it.
  virtual void conclude(bool is_alone) = 0;
};

// For the callback at the end of the backward that runs on this thread: lets `ending` close and
// conclude once the callbacks of all other reducers have run. If that never comes, because one of
// them throws, it is dropped.
void end_together(std::shared_ptr<EndingBackward> ending);

}  // namespace pydist
