// Groups whose tuner tries something with every operation.

#pragma once

#include "communicator/native/native_communicator.h"
#include "ranks.h"

namespace pydist::testing {

inline constexpr TuningRhythm kRestless{.uses_before_first = 0, .rounds = 3, .always_tries = true};

inline CommunicatorPtr join_restless(const RankOfTest& self, const Environment& environment,
                                     const TuningRhythm& rhythm = kRestless) {
  NativeOptions options{"restless", environment};
  options.tuning = rhythm;
  return create_native_communicator(self.store, self.rank, self.size, options, self.endpoint);
}

}  // namespace pydist::testing
