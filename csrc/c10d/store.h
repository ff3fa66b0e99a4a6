// torch's key-value stores (TCPStore, FileStore, HashStore, PrefixStore) as the engine's.
//
// Shares ownership of the torch store. Thread safe as far as the torch store is; a store written
// in Python takes the GIL, so callers must not hold it.
//
// A TCPStore whose server is stopped answers never, whatever time-out it was given. So it is asked
// on a thread of its own, and one that keeps silent for `patience` counts as gone (TransportError).
// Where no thread is to be had it is asked on the caller's, without that limit: a rank that has
// come to the end of its threads must be able to say so.

#pragma once

#include <chrono>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include "base/deadline.h"
#include "topology/key_value_store.h"
#include "topology/rendezvous.h"

namespace c10d {
class Store;
}

namespace pydist {

// A TCPStore whose name server is silent may take 10 s over each process that connects to it.
inline constexpr std::chrono::seconds kStorePatience{30};

// `ranks`: how many may wait there at a time. The more they are, the more seldom each of them asks
// (Note [Asking again]).
[[nodiscard]] StorePtr adapt_store(c10::intrusive_ptr<c10d::Store> store,
                                   std::chrono::milliseconds patience = kStorePatience,
                                   int ranks = 1);

// The same keys, under a prefix, on the same connection; but whoever waits for one asks for it
// again and again.
//
// For torch's gloo, which waits for its peers inside a call of the store: a TCPStore serves one
// call at a time, so a group that one thread makes would keep all other threads from the store
// until every rank has joined that group, which those threads may have to bring about. A connection
// of the group's own is no way out: a TCPStore looks up the name of whoever connects and answers
// nobody meanwhile, for 10 s where the name server is silent.
//
// A wait ends early with what the store holds under `news_key`, and with what `check_hope` throws;
// otherwise at `deadline`, however long whoever waits would do so.
[[nodiscard]] c10::intrusive_ptr<c10d::Store> poll_store(c10::intrusive_ptr<c10d::Store> store,
                                                         std::string news_key, CheckHope check_hope,
                                                         Deadline deadline);

}  // namespace pydist
