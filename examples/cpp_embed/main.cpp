// Stores the KV of a prompt, then restores the longest stored prefix of a second prompt that begins the same way.
//
// Usage: cpp_embed DIRECTORY. Run it twice: the second run finds on the disk what the first one stored.
#include <algorithm>
#include <cstdint>
#include <iostream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include <mlx/mlx.h>
#include <prefixcache/prefixcache.h>

namespace mx = mlx::core;
namespace pc = prefixcache;

namespace {

constexpr std::int64_t kBlock = 256;
constexpr int kLayers = 2;

// What a model would compute for these tokens: rows that depend on the token and its position, [1, heads, rows, size].
mx::array rows_of(const std::vector<std::uint32_t>& tokens, int layer) {
  constexpr int kHeads = 4;
  constexpr int kSize = 64;
  std::vector<float> values;
  for (int head = 0; head < kHeads; ++head) {
    for (std::size_t row = 0; row < tokens.size(); ++row) {
      for (int i = 0; i < kSize; ++i) {
        const auto place = static_cast<std::size_t>(layer * 5 + head + i);
        values.push_back(static_cast<float>((tokens[row] * 31 + row * 7 + place) % 997));
      }
    }
  }
  const mx::array full(values.data(), {1, kHeads, static_cast<int>(tokens.size()), kSize}, mx::float32);
  return mx::astype(full, mx::float16);
}

void require(const pc::Status& status, const std::string& what) {
  if (!status.is_ok()) throw std::runtime_error(what + ": " + status.message());
}

// One slot for each layer. Rows begin at position 0 of the sequence.
std::vector<pc::SlotInput> slots_of(const std::vector<std::uint32_t>& tokens) {
  std::vector<pc::SlotInput> slots;
  for (int layer = 0; layer < kLayers; ++layer) {
    slots.push_back({std::to_string(layer) + "/keys", rows_of(tokens, layer), 2});
  }
  return slots;
}

void store(pc::BlockStore& cache, const pc::Key& root, const std::vector<pc::Key>& keys,
           const std::vector<std::uint32_t>& tokens) {
  const std::vector<pc::SlotInput> slots = slots_of(tokens);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    pc::PutRequest request;
    request.key = keys[i];
    request.parent = i == 0 ? root : keys[i - 1];
    request.row_lo = static_cast<std::int64_t>(i) * kBlock;
    request.row_hi = request.row_lo + kBlock;
    request.depth = request.row_hi;
    request.tokens = std::span(tokens).subspan(static_cast<std::size_t>(request.row_lo), kBlock);
    request.slots = slots;
    require(cache.put(request), "put");
  }
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 2) {
    std::cerr << "usage: cpp_embed DIRECTORY\n";
    return 2;
  }
  pc::Options options;
  options.directory = argv[1];
  options.name_space = "cpp-embed-example";  // everything that must be equal for KV to be exchangeable
  options.ram_bytes = 64 << 20;
  options.disk_bytes = 1 << 30;
  const auto cache = pc::BlockStore::open(options);

  std::vector<std::uint32_t> first(4 * kBlock);
  std::iota(first.begin(), first.end(), 1000u);
  std::vector<std::uint32_t> second = first;
  for (std::size_t i = 3 * kBlock; i < second.size(); ++i) second[i] += 1;

  // Keys: once a prompt. Salts separate tenants and KV formats; there are none here.
  const pc::Key name_space = pc::namespace_id(options.name_space);
  const pc::Key root = pc::chain_root(name_space, {});
  const std::vector<pc::Key> first_keys = pc::chain_hashes(name_space, root, first, kBlock);
  const std::vector<pc::Key> second_keys = pc::chain_hashes(name_space, root, second, kBlock);

  const std::size_t before = cache->longest_prefix(first_keys, root, kBlock, pc::Part::kv);
  std::cout << "found " << before << " blocks of the first prompt from an earlier run\n";
  store(*cache, root, first_keys, first);

  // The second prompt shares three blocks with the first.
  const std::size_t hit = cache->longest_prefix(second_keys, root, kBlock, pc::Part::kv);
  std::cout << "the second prompt begins with " << hit << " stored blocks\n";
  if (hit != 3) throw std::runtime_error("expected 3 blocks in common");

  pc::GatherRequest request;
  request.keys.assign(second_keys.begin(), second_keys.begin() + static_cast<std::ptrdiff_t>(hit));
  request.row_hi = static_cast<std::int64_t>(hit) * kBlock;
  request.capacity = request.row_hi + kBlock;  // room for the tokens to come: the next append copies nothing
  const pc::Gathered gathered = cache->gather(request);
  require(gathered.status, "gather");

  const int rows = static_cast<int>(request.row_hi);
  for (int layer = 0; layer < kLayers; ++layer) {
    const mx::array& restored = gathered.slots[static_cast<std::size_t>(layer)].array;
    const mx::array wanted = mx::slice(rows_of(first, layer), {0, 0, 0, 0}, {1, 4, rows, 64});
    const mx::array got = mx::slice(restored, {0, 0, 0, 0}, {1, 4, rows, 64});
    if (!mx::array_equal(got, wanted).item<bool>()) throw std::runtime_error("restored rows differ");
  }
  std::cout << "restored " << rows << " rows of " << kLayers << " layers, " << gathered.ram_blocks
            << " blocks from RAM, " << gathered.disk_blocks << " from disk: equal to what was stored\n";

  require(cache->flush(), "flush");
  require(cache->close(), "close");
  return 0;
} catch (const std::exception& error) {
  std::cerr << "cpp_embed: " << error.what() << "\n";
  return 1;
}
