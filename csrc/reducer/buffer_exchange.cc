// The buffers of a model take over one rank's values: in rounds whose forward wants that, and when
// parameters are added.

#include "reducer/reducer.h"

namespace pydist {

void Reducer::exchange_buffers(int root) {
  if (communicator_->rank() == root) {
    buffers_->pack();
  }
  operations_.wait_for(*operations_.broadcast(buffers_->memory, root, "buffers"));
  if (communicator_->rank() != root) {
    buffers_->unpack();
  }
}

}  // namespace pydist
