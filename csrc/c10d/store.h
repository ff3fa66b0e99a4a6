// torch's key-value stores (TCPStore, FileStore, HashStore, PrefixStore) as the engine's.
//
// Shares ownership of the torch store. Thread safe as far as the torch store is; a store written
// in Python takes the GIL, so callers must not hold it.
//
// A TCPStore whose server is stopped answers never, whatever time-out it was given. So it is asked
// on a thread of its own, and one that keeps silent for `patience` counts as gone (TransportError).

#pragma once

#include <chrono>

#include <c10/util/intrusive_ptr.h>

#include "topology/key_value_store.h"

namespace c10d {
class Store;
}

namespace pydist {

inline constexpr std::chrono::seconds kStorePatience{10};

[[nodiscard]] StorePtr adapt_store(c10::intrusive_ptr<c10d::Store> store,
                                   std::chrono::milliseconds patience = kStorePatience);

}  // namespace pydist
