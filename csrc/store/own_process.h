// own_process.h: a store of the process that opened it. A process that was forked later has none of its threads.
//
// Threads: as the store.
// Owns:    the store. In a forked process it is left as it is: locks in it may be held by threads that are not there.
// Errors:  there every call answers Closed or a miss, and waits for nothing.
#pragma once

#include <memory>

#include "prefixcache/block_store.h"

namespace prefixcache::store {

std::unique_ptr<BlockStore> for_own_process(std::unique_ptr<BlockStore> store);

}  // namespace prefixcache::store
