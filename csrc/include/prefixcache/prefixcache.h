// prefixcache.h: everything public. Start with block_store.h.
#pragma once

#include "prefixcache/block_hash.h"
#include "prefixcache/block_store.h"
#include "prefixcache/digest.h"
#include "prefixcache/env.h"
#include "prefixcache/gather.h"
#include "prefixcache/options.h"
#include "prefixcache/part_files.h"
#include "prefixcache/slot.h"
#include "prefixcache/status.h"
#include "prefixcache/version.h"
