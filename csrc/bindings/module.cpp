// module.cpp: the extension prefixcache._core. What it binds lies in one file a public header.
#include "bindings/bindings.h"

NB_MODULE(_core, m) {
  m.doc() = "Native core of prefixcache: chain hashes, the block store and the gather.";
  prefixcache::bindings::init_block_hash(m);
  prefixcache::bindings::init_block_store(m);
  prefixcache::bindings::init_part_files(m);
}
