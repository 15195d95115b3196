// Any names and any bytes in a store's directory: opening, looking up, reading and clearing answer, and no row is
// served that was not stored. An input is a list of files:
//   1 byte   what: bits 0..1 the block, bits 2..3 the part (3: the name follows), bit 4 a checksum that matches
//   2 bytes  length of what follows, little-endian
//   a name of one byte for its length and so many bytes, if asked for
//   the rest edits of the sound file: 1 byte what (0 the byte at, 1 cut there, 2 more bytes behind), 2 bytes where, 1
//   value
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "prefixcache/block_store.h"
#include "support/blocks.h"
#include "support/match_checksum.h"
#include "support/memory_env.h"

namespace prefixcache {
namespace {

constexpr std::int64_t kSize = 4;
constexpr std::uint64_t kGroup = 3;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

std::vector<testing::SlotSpec> specs() {
  return {{"k", mlx::core::float16, {1, 2, 0, 3}, 2}, {"c", mlx::core::uint8, {0, 5}, 0}};
}

// The files of three blocks with all their parts, as a store writes them.
struct Sound {
  Sound() {
    const auto store = BlockStore::open(options());
    for (const auto& block : blocks) {
      put_block(*store, block, specs());
      put_window(*store, block, block.start() + 1, block.depth, kGroup, specs());
      put_state(*store, block);
    }
    const Status closed = store->close();
    require(closed.is_ok(), closed.message().c_str());
    for (const auto& [path, bytes] : env.files) {
      const std::string name = path.substr(path.rfind('/') + 1);
      const int part = name.find(".kv.") != std::string::npos ? 0 : name.find(".win.") != std::string::npos ? 1 : 2;
      for (std::size_t b = 0; b < blocks.size(); ++b) {
        const Key key = part == 1 ? group_key(blocks[b].key, kGroup) : blocks[b].key;
        if (name.starts_with(key.hex())) files[b][static_cast<std::size_t>(part)] = {path, *bytes};
      }
    }
    env.files.clear();
  }

  Options options() {
    Options options;
    options.directory = "/store";
    options.name_space = "test";
    options.threads = 1;
    options.env = &env;
    return options;
  }

  testing::MemoryEnv env;
  std::vector<testing::Block> blocks = testing::chain(3, kSize);
  struct File {
    std::string path;
    std::string bytes;
  };
  File files[3][3];
};

Sound& sound() {
  static Sound made;
  return made;
}

std::string edited(std::string bytes, std::string_view edits) {
  for (; edits.size() >= 4; edits.remove_prefix(4)) {
    const auto at = static_cast<std::size_t>(static_cast<std::uint8_t>(edits[1])) |
                    static_cast<std::size_t>(static_cast<std::uint8_t>(edits[2])) << 8;
    if (edits[0] % 3 == 0 && at < bytes.size()) bytes[at] = edits[3];
    if (edits[0] % 3 == 1) bytes.resize(std::min(at, bytes.size()));
    if (edits[0] % 3 == 2 && bytes.size() < 1 << 17) bytes.append(at, edits[3]);
  }
  return bytes;
}

// Makes the files of an input. True if one of them has a checksum that was made to match.
bool make_files(std::string_view input) {
  bool matched = false;
  while (input.size() >= 3) {
    const auto what = static_cast<std::uint8_t>(input[0]);
    const std::size_t length = static_cast<std::uint8_t>(input[1]) | static_cast<std::uint8_t>(input[2]) << 8;
    input.remove_prefix(3);
    std::string_view body = input.substr(0, length);
    input.remove_prefix(body.size());
    const std::size_t part = what >> 2 & 3;
    const Sound::File& file = sound().files[what % 3][part % 3];
    std::string path = file.path;
    if (part == 3 && !body.empty()) {
      const std::size_t wanted = static_cast<std::uint8_t>(body[0]);
      std::string name(body.substr(1, wanted));
      body.remove_prefix(1 + name.size());
      // What no directory can hold is not for this test.
      name.erase(std::remove_if(name.begin(), name.end(), [](char c) { return c == '/' || c == '\0'; }), name.end());
      if (!name.empty() && name != "." && name != "..") path.replace(path.rfind('/') + 1, std::string::npos, name);
    }
    std::string bytes = edited(file.bytes, body);
    if ((what & 16) != 0) {
      testing::match_checksum(bytes);
      matched = true;
    }
    sound().env.put(path, std::move(bytes));
  }
  return matched;
}

void check_rows(const Gathered& gathered, const std::vector<testing::Block>& blocks, std::int64_t lo, std::int64_t hi) {
  require(gathered.slots.size() == 2, "slots are missing");
  for (std::size_t i = 0; i < 2; ++i) {
    const auto wanted = testing::expected_bytes(specs()[i], blocks, lo, hi);
    require(testing::contiguous_bytes(gathered.slots[i].array) == wanted, "a wrong row was served");
  }
}

void use(BlockStore& store, bool matched) {
  const auto& blocks = sound().blocks;
  const auto keys = testing::keys_of(blocks);
  std::vector<std::uint32_t> tokens;
  for (const auto& block : blocks) tokens.insert(tokens.end(), block.tokens.begin(), block.tokens.end());
  const auto found = store.longest_prefix(keys, testing::test_root(), kSize, Part::kv);
  if (found > 0) {
    const std::vector<testing::Block> prefix(blocks.begin(), blocks.begin() + static_cast<long>(found));
    const Gathered gathered = store.gather(testing::request_for(prefix));
    require(gathered.status.is_ok() || gathered.good < found, "all is good, and yet it failed");
    if (gathered.status.is_ok() && !matched) check_rows(gathered, prefix, 0, prefix.back().depth);
  }
  const ChainView view{testing::test_root(), keys, kSize, tokens, {}};
  const auto limit = static_cast<std::int64_t>(tokens.size());
  require(store.deepest_window(view, {3, 0, kGroup}, limit).n <= limit, "a window beyond the end");
  const Point state = store.deepest_state(view, limit);
  require(state.n <= limit && store.deepest_fork(view, limit) <= limit, "a state beyond the end");
  if (state.n > 0) store.load(state.last, Part::state);
  for (const auto& block : blocks) {
    store.children(block.parent);
    store.longest_child(block.parent, block.start(), block.tokens, {}, Part::kv);
    const Gathered window = store.load(group_key(block.key, kGroup), Part::win);
    if (window.status.is_ok() && !matched) check_rows(window, {block}, block.start() + 1, block.depth);
  }
}

void run(std::string_view input) {
  const bool matched = make_files(input);
  {
    const auto store = BlockStore::open(sound().options());
    use(*store, matched);
    use(*store, matched);
    const StoreStats stats = store->stats();
    require(stats.write_errors == 0, "nothing was to be written");
    store->clear();
    require(store->stats().parts == 0, "something was not forgotten");
  }
  sound().env.files.clear();
}

}  // namespace
}  // namespace prefixcache

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  prefixcache::run({reinterpret_cast<const char*>(data), size});
  return 0;
}
