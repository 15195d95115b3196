// block_store.h: rows of cache slots, kept in blocks of tokens under chain-hash keys, in RAM and on SSD.
//
// Threads: any method from any thread. put() may return before the bytes are on disk; flush() waits for them. A store
//          is of the process that opened it: in one that was forked since, calls answer Closed or a miss.
// Owns:    its part files below the directory, its index, its RAM tier and its writer thread.
// Units:   bytes for sizes, tokens for positions, rows and depths.
// Errors:  misuse throws std::invalid_argument. Everything else returns a Status: a miss is NotFound, a damaged file is
//          Corrupt and is forgotten and removed before the call returns.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "prefixcache/api.h"
#include "prefixcache/block_hash.h"
#include "prefixcache/gather.h"
#include "prefixcache/options.h"
#include "prefixcache/slot.h"
#include "prefixcache/status.h"

namespace prefixcache {

// One part to store: rows [row_lo, row_hi) of every slot that has a sequence axis, and the others whole.
struct PutRequest {
  Key key;
  Key parent;
  // Tokens up to and including this block.
  std::int64_t depth = 0;
  Part part = Part::kv;
  std::int64_t row_lo = 0;
  std::int64_t row_hi = 0;
  // The block's own tokens; the block covers positions [depth - tokens.size(), depth).
  std::span<const std::uint32_t> tokens;
  // Content keys that first apply in this block.
  std::span<const ContentKey> content;
  std::span<const SlotInput> slots;
  // Text that comes back with gather() and load(). At most 1 MiB.
  std::string_view meta;
  // The reach that these rows are needed over: key and parent are stored as group_key(..., group).
  std::uint64_t group = 0;
};

// What the index knows of one part. No tensor is read for it.
struct PartInfo {
  bool present = false;
  bool in_ram = false;
  bool on_disk = false;
  std::int64_t row_lo = 0;
  std::int64_t row_hi = 0;
};

struct Presence {
  PartInfo parts[kPartCount];
  bool has(Part part) const { return parts[static_cast<int>(part)].present; }
};

// A block stored under a given parent.
struct Child {
  Key key;
  std::int64_t depth = 0;
  std::vector<std::uint32_t> tokens;
  std::vector<ContentKey> content;
};

// The child that shares the longest run of tokens.
struct ChildMatch {
  Key key;
  std::int64_t depth = 0;
  std::int64_t rows = 0;        // tokens in common, content keys considered
  std::int64_t block_rows = 0;  // tokens of that child; 0: there is no child
};

// Which rows of a window are needed to stand at n: [0, n) up to n = window, behind it the last `window - keep` ones.
struct WindowReach {
  std::int64_t window = 1;
  std::int64_t keep = 0;
  std::uint64_t group = 0;

  std::int64_t first_row(std::int64_t n) const { return n <= window ? 0 : n - (window - keep); }
};

// A sequence and the keys of its whole blocks.
struct ChainView {
  Key root;
  std::span<const Key> keys;
  std::int64_t block_size = 1;
  std::span<const std::uint32_t> tokens;
  std::span<const ContentKey> content;
};

// Where a sequence can be taken up: after `n` tokens (0: nowhere). `last`: the block or tail that ends there or in
// which it lies, before group_key() is applied.
struct Point {
  std::int64_t n = 0;
  Key last;
};

struct StoreStats {
  std::uint64_t parts = 0;
  std::uint64_t parts_in_ram = 0;
  std::uint64_t ram_bytes = 0;  // held by the RAM tier now, recycled memory included
  std::uint64_t ram_peak_bytes = 0;
  std::uint64_t disk_bytes = 0;    // below the directory, every namespace
  std::uint64_t queued_bytes = 0;  // waiting to be written now
  std::uint64_t put_parts = 0;
  std::uint64_t put_bytes = 0;     // tensor bytes accepted by put()
  std::uint64_t put_existing = 0;  // put() of a part that was there: nothing was copied
  std::uint64_t put_full = 0;      // put() answered Full
  std::uint64_t written_parts = 0;
  std::uint64_t written_bytes = 0;   // file bytes, headers included
  std::uint64_t write_errors = 0;    // parts that the file system refused, or that close() gave up
  std::uint64_t left_out_parts = 0;  // not written, since nothing may go that would make room below the disk cap
  std::uint64_t gathered_ram_bytes = 0;
  std::uint64_t gathered_disk_bytes = 0;
  std::uint64_t gathered_device_bytes = 0;  // those of them that a GPU's kernel copied
  std::uint64_t device_refusals = 0;        // gathers of which the kernel refused something: the CPU copied it
  std::uint64_t corrupt_parts = 0;          // forgotten because a check failed
  std::uint64_t lost_parts = 0;             // in the index, but the file was gone
  std::uint64_t evicted_ram_parts = 0;
  std::uint64_t evicted_disk_parts = 0;
  bool degraded = false;  // the last write failed: new parts stay in RAM only
  std::string last_error;
};

class PREFIXCACHE_API BlockStore {
 public:
  // Opens or makes the store. File contents are not read. Throws std::invalid_argument for bad options or a directory
  // that others could write to. A directory that cannot be used for another reason gives a degraded store in RAM.
  static std::unique_ptr<BlockStore> open(const Options& options);

  // As close(). What hangs in the real file system goes on by itself and touches nothing of the caller's.
  virtual ~BlockStore() = default;
  BlockStore(const BlockStore&) = delete;
  BlockStore& operator=(const BlockStore&) = delete;

  virtual const Options& options() const = 0;

  // Copies the rows; they may be gathered from the moment put() returns. Arrays that are not evaluated yet are
  // evaluated on the calling thread; several threads may store the same ones, if no other code reads their bytes
  // meanwhile. A block that begins with the tokens of a shorter one under the same parent takes
  // its place. Sets `added` to the tensor bytes copied: 0 for rows that were there. Returns: Ok (kept now, or was
  // there), Full, Closed.
  virtual Status put(const PutRequest& request, std::uint64_t* added = nullptr) = 0;

  // For each key what is stored. Index only.
  virtual std::vector<Presence> presence(std::span<const Key> keys) const = 0;

  // How many leading blocks of a chain have the whole of `part`. keys[i] must be the block that ends at
  // (i + 1) * block_size and keys[i - 1] (or `root`) its parent. Index only, but for the first missing block, which is
  // looked for on disk in case another process wrote it.
  virtual std::size_t longest_prefix(std::span<const Key> keys, const Key& root, std::int64_t block_size,
                                     Part part) = 0;

  // The blocks stored under `parent`, newest first. May read headers of files that were not read yet.
  virtual std::vector<Child> children(const Key& parent) = 0;

  // The child of `parent` that shares the longest run with `tokens`, which begin at position `start`. `content` holds
  // the content keys of the whole sequence: rows from where they differ are not counted. Of children in files that
  // were not read yet, at most 64 headers are read in one call, of the newest first.
  virtual ChildMatch longest_child(const Key& parent, std::int64_t start, std::span<const std::uint32_t> tokens,
                                   std::span<const ContentKey> content, Part part) = 0;

  // The largest n up to `limit` for which all rows that `reach` needs at n are stored as Part::win, but for the kept
  // ones. Index only, but for headers of files that were not read yet, and at most 8 questions to the disk.
  virtual Point deepest_window(const ChainView& chain, const WindowReach& reach, std::int64_t limit) = 0;

  // The largest n up to `limit` at which a Part::state of this very sequence was put.
  virtual Point deepest_state(const ChainView& chain, std::int64_t limit) = 0;

  // The largest n below `limit` where something stored leaves this sequence: its tokens go on otherwise. 0: nowhere.
  virtual std::int64_t deepest_fork(const ChainView& chain, std::int64_t limit) = 0;

  // Makes a part the most recently used, and with a part `kv` the blocks before it.
  virtual void touch(const Key& key, Part part) = 0;

  // Copies rows of consecutive blocks into fresh arrays: one copy, by a small thread pool, arrays ready on return.
  virtual Gathered gather(const GatherRequest& request) = 0;

  // One part as it was put: every slot whole.
  virtual Gathered load(const Key& key, Part part) = 0;

  // Forgets parts and removes their files. Parts that are not there are not an error.
  virtual Status erase(std::span<const Key> keys, std::span<const Part> parts) = 0;

  // Forgets and removes everything of this namespace.
  virtual Status clear() = 0;

  // Waits until everything accepted so far is in its file, or was left out because the disk cap has no room for it.
  // Returns the first write error since the last flush(). IOError (ETIMEDOUT) after flush_wait_seconds without a sign
  // of life from the disk: what waits still does.
  virtual Status flush() = 0;

  // Gives memory back to the system, recycled memory first, until the RAM tier holds at most `target_bytes`: drops the
  // least recently used copies of parts that are on disk, or without an SSD tier the parts. Passed over are parts that
  // wait to be written, those that are being read and those of protected blocks. Where a GPU reads the RAM tier, memory
  // goes back to MLX, and by whole slabs of an eighth of the bound. Returns the bytes given back.
  virtual std::uint64_t trim_ram(std::uint64_t target_bytes, std::span<const Key> protected_keys = {}) = 0;

  virtual StoreStats stats() const = 0;

  // Writes what waits, then stops the threads. Every later call answers Closed or a miss. Safe to call twice. IOError
  // (ETIMEDOUT) after flush_wait_seconds without a sign of life from the disk: what waited is lost.
  virtual Status close() = 0;

 protected:
  BlockStore() = default;
};

}  // namespace prefixcache
