#include "communicator/complaints.h"

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "health/text_field.h"

namespace pydist {
namespace {

// Of one rank; plain bytes, as it travels.
struct Notice {
  std::array<char, 511> complaint{};
  bool says_yes = true;
};

}  // namespace

Hearing hear_all(Communicator& communicator, const std::string& complaint, const char* about,
                 bool says_yes, const std::function<void()>& meanwhile) {
  Notice mine{.says_yes = says_yes};
  write_text(mine.complaint, complaint);
  std::vector<Notice> all(static_cast<std::size_t>(communicator.size()));
  Operation operation;
  operation.kind = OpKind::kAllGather;
  operation.inputs = {Buffer{&mine, sizeof mine, DType::kUInt8, {}}};
  operation.outputs = {Buffer{all.data(), all.size() * sizeof(Notice), DType::kUInt8, {}}};
  operation.label = about;
  if (meanwhile == nullptr) {
    communicator.run(std::move(operation));
  } else {
    const WorkPtr told = communicator.submit(std::move(operation));
    while (!told->is_completed()) {
      meanwhile();
    }
    told->wait();
  }
  Hearing hearing;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!hearing.first && all[rank].complaint[0] != '\0') {
      hearing.first = Complaint{static_cast<int>(rank), read_text(all[rank].complaint)};
    }
    hearing.all_say_yes = hearing.all_say_yes && all[rank].says_yes;
  }
  return hearing;
}

}  // namespace pydist
