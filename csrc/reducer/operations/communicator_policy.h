// The policy of a reducer without a communication hook: the communicator combines a bucket, in one
// operation. It weighs the gradients, divides their sum, and converts to the wire type and back.

#pragma once

#include <utility>

#include "reducer/operations/bucket_policy.h"

namespace pydist {

class CommunicatorPolicy final : public BucketPolicy {
 public:
  // The operations are waited for with the others of the round.
  explicit CommunicatorPolicy(OperationsUnderWay& operations) : operations_(operations) {}

  [[nodiscard]] WorkPtr reduce(const DepartingBucket& bucket, const Combination& combination,
                               Work::Callback on_completion) override {
    WorkPtr work = operations_.combine(combination, bucket.memory, bucket.shard, bucket.label);
    work->on_completion(std::move(on_completion));
    return work;
  }

 private:
  OperationsUnderWay& operations_;
};

}  // namespace pydist
