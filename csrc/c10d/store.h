// torch's key-value stores (TCPStore, FileStore, HashStore, PrefixStore) as the engine's.
//
// Shares ownership of the torch store. Thread safe as far as the torch store is; a store written
// in Python takes the GIL, so callers must not hold it.

#pragma once

#include <c10/util/intrusive_ptr.h>

#include "topology/key_value_store.h"

namespace c10d {
class Store;
}

namespace pydist {

[[nodiscard]] StorePtr adapt_store(c10::intrusive_ptr<c10d::Store> store);

}  // namespace pydist
