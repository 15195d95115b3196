// options.h: how a BlockStore is opened.
//
// Threads: a plain value.
// Owns:    `env` must outlive the store, whose destructor waits for every call into it.
// Units:   bytes for sizes, seconds for times.
// Errors:  BlockStore::open throws std::invalid_argument that names the field and its value.
#pragma once

#include <cstdint>
#include <string>

#include "prefixcache/api.h"

namespace prefixcache {

class Env;

// When a part reaches the disk: soon; when it leaves the RAM tier, or with flush() and close(); never.
enum class WritePolicy { through, back, ram_only };

// When the checksum of a part read from a file is compared: on its first read since open, on every read, or never.
enum class Verify { first, always, never };

struct PREFIXCACHE_API Options {
  // Where parts are kept. Made (mode 0700) if missing; refused unless it belongs to this user and nobody else may
  // write to it. Empty only with WritePolicy::ram_only.
  std::string directory;
  // Everything that must be equal for KV to be exchangeable. 1..128 characters of [A-Za-z0-9._-], not beginning with
  // '.'.
  std::string name_space;
  // Bound on the RAM tier: every byte it holds, recycled staging memory included. 0: no RAM tier.
  std::uint64_t ram_bytes = 0;
  // Bound on everything below `directory`, other namespaces and temporary files included. Checked before each write.
  std::uint64_t disk_bytes = std::uint64_t{1} << 40;
  // Bound on parts that wait to be written. A larger bound absorbs longer bursts; what waits is lost by a kill.
  std::uint64_t queue_bytes = std::uint64_t{1} << 30;
  // How long put() may wait for room in the queue before it answers Full.
  double put_wait_seconds = 2.0;
  // How long a lookup may wait for the disk, and a read too, which has a second more for every 64 MiB. What takes
  // longer is a miss, and the disk is left alone until it answers again.
  double disk_wait_seconds = 2.0;
  // How long flush() and close() wait without a sign of life from the disk: a part that is written, a folder that is
  // listed. Then flush() gives up, and close() too: what still waits is lost.
  double flush_wait_seconds = 60;
  WritePolicy write = WritePolicy::through;
  Verify verify = Verify::first;
  // Threads that copy, the calling one included. 0: one for each core, at most 8.
  int threads = 0;
  // Temporary files of other processes are left alone until they are this old.
  double temp_grace_seconds = 600;
  // The file system. Null: the real one, whose calls may go on for as long as they hang when the store is gone.
  Env* env = nullptr;
};

}  // namespace prefixcache
