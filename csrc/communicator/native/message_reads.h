// How a rank copies a message from where its sender has it.

#pragma once

#include <memory>

#include "collectives/group.h"
#include "transport/messages.h"

namespace pydist {

[[nodiscard]] std::unique_ptr<MessageReads> message_reads(std::shared_ptr<const Group> group);

}  // namespace pydist
