// api.h: symbol visibility. Everything not marked PREFIXCACHE_API is private to the library.
#pragma once

#define PREFIXCACHE_API __attribute__((visibility("default")))
