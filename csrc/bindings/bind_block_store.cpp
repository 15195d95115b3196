// bind_block_store.cpp: block_store.h, options.h, gather.h and status.h.
#include "arrays/shared_array.h"
#include "bindings/bindings.h"
#include "bindings/key_casts.h"
#include "bindings/key_chain.h"
#include "bindings/token_buffer.h"
#include "prefixcache/block_store.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>

#include <mlx/transforms.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace prefixcache::bindings {

namespace {

// The slots of a store call, checked and evaluated once for all its blocks.
struct Slots {
  std::vector<SlotInput> items;
};

Slots make_slots(const nb::list& items) {
  Slots slots;
  std::vector<mlx::core::array> pending;
  for (nb::handle item : items) {
    const auto tuple = nb::cast<nb::tuple>(item);
    if (tuple.size() != 4) throw nb::value_error("a slot is (name, array, seq_axis or None, first_row)");
    SlotInput slot{nb::cast<std::string>(tuple[0]), nb::cast<mlx::core::array>(tuple[1]),
                   tuple[2].is_none() ? kNoSeqAxis : nb::cast<int>(tuple[2], false),
                   nb::cast<std::int64_t>(tuple[3], false)};
    if (!tuple[2].is_none() && slot.seq_axis < 0) {
      throw nb::value_error(("slot '" + slot.name + "' has seq_axis " + std::to_string(slot.seq_axis) + " and rank " +
                             std::to_string(slot.array.ndim()))
                                .c_str());
    }
    if (!is_evaluated(slot.array)) pending.push_back(slot.array);
    slots.items.push_back(std::move(slot));
  }
  if (!pending.empty()) {
    nb::gil_scoped_release release;
    mlx::core::eval(std::move(pending));
  }
  return slots;
}

std::vector<Key> to_keys(const nb::list& list) {
  std::vector<Key> keys;
  keys.reserve(list.size());
  for (nb::handle item : list) keys.push_back(to_key(nb::cast<nb::bytes>(item), "key"));
  return keys;
}

nb::dict to_dict(const StoreStats& stats) {
  nb::dict out;
  const auto add = [&](const char* name, auto value) { out[name] = value; };
  add("parts", stats.parts);
  add("parts_in_ram", stats.parts_in_ram);
  add("ram_bytes", stats.ram_bytes);
  add("ram_peak_bytes", stats.ram_peak_bytes);
  add("disk_bytes", stats.disk_bytes);
  add("queued_bytes", stats.queued_bytes);
  add("put_parts", stats.put_parts);
  add("put_bytes", stats.put_bytes);
  add("put_existing", stats.put_existing);
  add("put_full", stats.put_full);
  add("written_parts", stats.written_parts);
  add("written_bytes", stats.written_bytes);
  add("write_errors", stats.write_errors);
  add("left_out_parts", stats.left_out_parts);
  add("gathered_ram_bytes", stats.gathered_ram_bytes);
  add("gathered_disk_bytes", stats.gathered_disk_bytes);
  add("gathered_device_bytes", stats.gathered_device_bytes);
  add("device_refusals", stats.device_refusals);
  add("corrupt_parts", stats.corrupt_parts);
  add("lost_parts", stats.lost_parts);
  add("evicted_ram_parts", stats.evicted_ram_parts);
  add("evicted_disk_parts", stats.evicted_disk_parts);
  add("degraded", stats.degraded);
  add("last_error", stats.last_error);
  return out;
}

// The slots of a Gathered, moved out, so that each array stays its buffer's only owner.
nb::dict take_slots(Gathered& gathered) {
  nb::dict out;
  for (auto& slot : gathered.slots) out[slot.name.c_str()] = nb::cast(std::move(slot.array), nb::rv_policy::move);
  gathered.slots.clear();
  return out;
}

void init_values(nb::module_& m) {
  nb::enum_<Part>(m, "Part", "The slots of one reach in one block.")
      .value("kv", Part::kv)
      .value("win", Part::win)
      .value("state", Part::state);
  nb::enum_<StatusCode>(m, "StatusCode", "What became of an operation.")
      .value("OK", StatusCode::Ok)
      .value("NOT_FOUND", StatusCode::NotFound)
      .value("CORRUPT", StatusCode::Corrupt)
      .value("FULL", StatusCode::Full)
      .value("IO_ERROR", StatusCode::IOError)
      .value("CLOSED", StatusCode::Closed);
  nb::class_<Status>(m, "Status", "The result of an operation; true if it went well.")
      .def("__bool__", &Status::is_ok)
      .def_prop_ro("code", &Status::code)
      .def_prop_ro("error_number", &Status::error_number, "The errno behind IO_ERROR, else 0.")
      .def_prop_ro("message", [](const Status& status) { return status.message(); })
      .def("__repr__", [](const Status& s) { return "<Status " + (s.is_ok() ? "ok" : s.message()) + ">"; });
  nb::class_<Slots>(m, "Slots", "Arrays to store from, evaluated on the thread that makes this.")
      .def(
          "__init__", [](Slots* self, const nb::list& items) { new (self) Slots(make_slots(items)); }, "items"_a,
          nb::sig("def __init__(self, items: list[tuple[str, mlx.core.array, int | None, int]]) -> None"),
          "items: (name, array, sequence axis or None, position of the array's first row).");
  nb::class_<Gathered>(m, "Gathered", "What gather() and load() answer.")
      .def_ro("status", &Gathered::status)
      .def_ro("good", &Gathered::good, "Leading blocks that may be asked for again after a failure.")
      .def_ro("meta", &Gathered::meta)
      .def_ro("ram_bytes", &Gathered::ram_bytes)
      .def_ro("disk_bytes", &Gathered::disk_bytes)
      .def_ro("ram_blocks", &Gathered::ram_blocks)
      .def_ro("disk_blocks", &Gathered::disk_blocks)
      .def("take_slots", &take_slots, nb::sig("def take_slots(self) -> dict[str, mlx.core.array]"),
           "The arrays by slot name. They leave this object: a second call gives an empty dict.");
}

std::unique_ptr<BlockStore> open_store(const std::string& directory, const std::string& name_space,
                                       std::uint64_t ram_bytes, std::uint64_t disk_bytes, std::uint64_t queue_bytes,
                                       double put_wait_seconds, double disk_wait_seconds, double flush_wait_seconds,
                                       const std::string& write, const std::string& verify, int threads) {
  Options options;
  options.directory = directory;
  options.name_space = name_space;
  options.ram_bytes = ram_bytes;
  options.disk_bytes = disk_bytes;
  options.queue_bytes = queue_bytes;
  options.put_wait_seconds = put_wait_seconds;
  options.disk_wait_seconds = disk_wait_seconds;
  options.flush_wait_seconds = flush_wait_seconds;
  options.threads = threads;
  if (write == "ram_only") {
    options.write = WritePolicy::ram_only;
  } else if (write == "back") {
    options.write = WritePolicy::back;
  } else if (write != "through") {
    throw nb::value_error(("write is '" + write + "', expected 'through', 'back' or 'ram_only'").c_str());
  }
  if (verify == "always") {
    options.verify = Verify::always;
  } else if (verify == "never") {
    options.verify = Verify::never;
  } else if (verify != "first") {
    throw nb::value_error(("verify is '" + verify + "', expected 'first', 'always' or 'never'").c_str());
  }
  nb::gil_scoped_release release;
  return BlockStore::open(options);
}

std::pair<Status, std::uint64_t> put(BlockStore& self, const nb::bytes& key, const nb::bytes& parent,
                                     std::int64_t depth, const TokenBuffer& tokens, const Slots& slots,
                                     std::int64_t row_lo, std::int64_t row_hi, std::string_view meta, Part part,
                                     const std::vector<ContentItem>& content, std::uint64_t group) {
  PutRequest request;
  request.key = to_key(key, "key");
  request.parent = to_key(parent, "parent");
  request.depth = depth;
  request.part = part;
  request.row_lo = row_lo;
  request.row_hi = row_hi;
  request.tokens = tokens.span();
  request.slots = slots.items;
  request.meta = meta;
  request.group = group;
  const std::vector<ContentKey> content_keys = to_content(content);
  request.content = content_keys;
  std::uint64_t added = 0;
  nb::gil_scoped_release release;
  Status status = self.put(request, &added);
  return {std::move(status), added};
}

Gathered gather(BlockStore& self, const nb::list& keys, std::int64_t row_lo, std::int64_t row_hi, std::int64_t capacity,
                Part part, std::vector<std::string> slots, std::uint64_t group) {
  GatherRequest request{to_keys(keys), part, row_lo, row_hi, capacity, std::move(slots), group};
  nb::gil_scoped_release release;
  return self.gather(request);
}

std::size_t longest_prefix(BlockStore& self, const nb::list& keys, const nb::bytes& root, std::int64_t block_size,
                           Part part) {
  const std::vector<Key> chain = to_keys(keys);
  const Key start = to_key(root, "root");
  nb::gil_scoped_release release;
  return self.longest_prefix(chain, start, block_size, part);
}

using ChildItem = std::tuple<nb::bytes, std::int64_t, std::int64_t, std::int64_t>;

std::optional<ChildItem> longest_child(BlockStore& self, const nb::bytes& parent, std::int64_t start,
                                       const TokenBuffer& tokens, const std::vector<ContentItem>& content, Part part) {
  const Key key = to_key(parent, "parent");
  const std::vector<ContentKey> content_keys = to_content(content);
  ChildMatch match;
  {
    nb::gil_scoped_release release;
    match = self.longest_child(key, start, tokens.span(), content_keys, part);
  }
  if (match.block_rows == 0) return std::nullopt;
  return ChildItem{to_bytes(match.key), match.depth, match.rows, match.block_rows};
}

ChainView view(const KeyChain& chain) {
  return {chain.root, chain.keys, chain.block_size, chain.tokens.span(), chain.content};
}

using PointItem = std::pair<std::int64_t, nb::bytes>;

std::optional<PointItem> to_item(const Point& point) {
  if (point.n == 0) return std::nullopt;
  return PointItem{point.n, to_bytes(point.last)};
}

std::optional<PointItem> deepest_window(BlockStore& self, const KeyChain& chain, std::int64_t window, std::int64_t keep,
                                        std::uint64_t group, std::int64_t limit) {
  Point point;
  {
    nb::gil_scoped_release release;
    point = self.deepest_window(view(chain), {window, keep, group}, limit);
  }
  return to_item(point);
}

std::optional<PointItem> deepest_state(BlockStore& self, const KeyChain& chain, std::int64_t limit) {
  Point point;
  {
    nb::gil_scoped_release release;
    point = self.deepest_state(view(chain), limit);
  }
  return to_item(point);
}

std::int64_t deepest_fork(BlockStore& self, const KeyChain& chain, std::int64_t limit) {
  nb::gil_scoped_release release;
  return self.deepest_fork(view(chain), limit);
}

void touch(BlockStore& self, const nb::bytes& key, Part part) {
  const Key wanted = to_key(key, "key");
  nb::gil_scoped_release release;
  self.touch(wanted, part);
}

nb::list children(BlockStore& self, const nb::bytes& parent) {
  const Key key = to_key(parent, "parent");
  std::vector<Child> found;
  {
    nb::gil_scoped_release release;
    found = self.children(key);
  }
  nb::list out;
  for (const auto& child : found) {
    nb::list tokens;
    for (const auto token : child.tokens) tokens.append(token);
    out.append(nb::make_tuple(to_bytes(child.key), child.depth, tokens));
  }
  return out;
}

nb::list presence(BlockStore& self, const nb::list& keys) {
  const std::vector<Key> chain = to_keys(keys);
  std::vector<Presence> found;
  {
    nb::gil_scoped_release release;
    found = self.presence(chain);
  }
  nb::list out;
  for (const Presence& one : found) {
    nb::dict parts;
    for (int p = 0; p < kPartCount; ++p) {
      const PartInfo& info = one.parts[p];
      const std::string name(part_name(static_cast<Part>(p)));
      if (info.present) parts[name.c_str()] = nb::make_tuple(info.in_ram, info.on_disk, info.row_lo, info.row_hi);
    }
    out.append(parts);
  }
  return out;
}

Status erase(BlockStore& self, const nb::list& keys, const std::vector<Part>& parts) {
  const std::vector<Key> list = to_keys(keys);
  nb::gil_scoped_release release;
  return self.erase(list, parts);
}

std::uint64_t trim_ram(BlockStore& self, std::uint64_t target_bytes, const nb::list& protected_keys) {
  const std::vector<Key> keys = to_keys(protected_keys);
  nb::gil_scoped_release release;
  return self.trim_ram(target_bytes, keys);
}

}  // namespace

void init_block_store(nb::module_& m) {
  init_values(m);
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<BlockStore>(m, "BlockStore", "Rows of cache slots in blocks of tokens, in RAM and on SSD. Any thread.")
      .def_static("open", &open_store, nb::kw_only(), "directory"_a, "namespace"_a, "ram_bytes"_a, "disk_bytes"_a,
                  "queue_bytes"_a, "put_wait_seconds"_a = 2.0, "disk_wait_seconds"_a = 2.0,
                  "flush_wait_seconds"_a = 60.0, "write"_a = "through", "verify"_a = "first", "threads"_a = 0,
                  "Opens or makes a store. ValueError names the option that is wrong.")
      .def("put", &put, "key"_a, "parent"_a, "depth"_a, "tokens"_a, "slots"_a, "row_lo"_a, "row_hi"_a, "meta"_a = "",
           "part"_a = Part::kv, "content"_a = std::vector<ContentItem>{}, "group"_a = 0,
           "Copies rows [row_lo, row_hi) of every slot. Returns OK, FULL or CLOSED, and the bytes copied: 0 for rows\n"
           "that were there.")
      .def("presence", &presence, "keys"_a,
           nb::sig("def presence(self, keys: list[bytes]) -> list[dict[str, tuple[bool, bool, int, int]]]"),
           "For each key its parts: (in RAM, on disk, first row, row behind the last; -1 where not known yet).")
      .def("longest_prefix", &longest_prefix, "keys"_a, "root"_a, "block_size"_a, "part"_a = Part::kv,
           nb::sig("def longest_prefix(self, keys: list[bytes], root: bytes, block_size: int, "
                   "part: Part = ...) -> int"),
           "Leading blocks of a chain that have the part.")
      .def("longest_child", &longest_child, "parent"_a, "start"_a, "tokens"_a, "content"_a, "part"_a = Part::kv,
           "The child of `parent` with the longest run of `tokens`: (key, depth, rows in common, its rows), or None.")
      .def("deepest_window", &deepest_window, "chain"_a, "window"_a, "keep"_a, "group"_a, "limit"_a,
           "The largest n <= limit whose window of rows is stored, and the key of the block in which it lies; or None.")
      .def("deepest_state", &deepest_state, "chain"_a, "limit"_a,
           "The largest n <= limit at which a state of these tokens was put, and the key of its block; or None.")
      .def("deepest_fork", &deepest_fork, "chain"_a, "limit"_a,
           "The largest n < limit where something stored goes on with other tokens than these; 0: nowhere.")
      .def("touch", &touch, "key"_a, "part"_a = Part::kv,
           "Makes a part the most recently used, and with a part kv the blocks before it.")
      .def("children", &children, "parent"_a,
           nb::sig("def children(self, parent: bytes) -> list[tuple[bytes, int, list[int]]]"),
           "Blocks stored under `parent`: (key, depth, tokens), newest first.")
      .def("gather", &gather, "keys"_a, "row_lo"_a, "row_hi"_a, "capacity"_a, "part"_a = Part::kv,
           "slots"_a = std::vector<std::string>{}, "group"_a = 0,
           nb::sig("def gather(self, keys: list[bytes], row_lo: int, row_hi: int, capacity: int, part: Part = ..., "
                   "slots: list[str] = [], group: int = 0) -> Gathered"),
           "Copies rows of consecutive blocks into fresh arrays of `capacity` rows; spare rows are zero.")
      .def(
          "load",
          [](BlockStore& self, const nb::bytes& key, Part part) {
            const Key wanted = to_key(key, "key");
            nb::gil_scoped_release release;
            return self.load(wanted, part);
          },
          "key"_a, "part"_a = Part::kv, "One part as it was put.")
      .def("erase", &erase, "keys"_a, "parts"_a,
           nb::sig("def erase(self, keys: list[bytes], parts: list[Part]) -> Status"), "Forgets parts and their files.")
      .def("clear", &BlockStore::clear, Release(), "Forgets everything of this namespace.")
      .def("flush", &BlockStore::flush, Release(),
           "Waits for queued writes, as long as the disk answers; the first error since the last flush.")
      .def("trim_ram", &trim_ram, "target_bytes"_a, "protected"_a = nb::list(),
           nb::sig("def trim_ram(self, target_bytes: int, protected: list[bytes] = []) -> int"),
           "Gives memory back to the system until the RAM tier holds at most that; returns how much. What is only in\n"
           "RAM stays, unless there is no disk; so does what is being read or written, and what is protected.")
      .def(
          "stats",
          [](const BlockStore& self) {
            StoreStats stats;
            {
              nb::gil_scoped_release release;
              stats = self.stats();
            }
            return to_dict(stats);
          },
          nb::sig("def stats(self) -> dict[str, int | bool | str]"), "Counters and sizes; see StoreStats.")
      .def("close", &BlockStore::close, Release(),
           "Writes what waits, as long as the disk answers, and stops. Safe to call twice.");
}

}  // namespace prefixcache::bindings
