// Work spread over the threads that torch's own operators run on.

#pragma once

#include <cstdint>
#include <functional>

namespace pydist {

// Calls run(first, last) for ranges that together are [0, count), at the same time on as many
// threads as torch.set_num_threads() asked for, and returns once all have. No range is much shorter
// than `grain`; on a thread of torch's own there is only one range. Needs no GIL.
void on_torch_threads(std::int64_t count, std::int64_t grain,
                      const std::function<void(std::int64_t first, std::int64_t last)>& run);

}  // namespace pydist
