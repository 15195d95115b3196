// Part files that somebody made to hurt the reader, each with a checksum that matches and under the right name: a miss,
// with no more memory than the file has bytes, in no time, and nothing touched outside of the directory.
#include <chrono>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include <sys/stat.h>

#include <gtest/gtest.h>
#include <mlx/memory.h>

#include "layout/sample_headers.h"
#include "support/store_fixture.h"
#include "support/watched_heap.h"

namespace prefixcache {
namespace {

namespace fs = std::filesystem;
using layout::testing::seal;
using testing::Block;
using testing::chain;
using testing::largest;

constexpr const char* kKeys = R"("keys":{"dtype":"U8","shape":[8,6],"data_offsets":[0,48]})";
constexpr const char* kCodes = R"("codes":{"dtype":"U8","shape":[8,2],"data_offsets":[48,64]})";

std::vector<testing::SlotSpec> specs() {
  return {{"keys", mlx::core::uint8, {0, 6}, 0}, {"codes", mlx::core::uint8, {0, 2}, 0}};
}

class HostileFile : public testing::StoreFixture {
 protected:
  HostileFile() { options_.threads = 1; }

  void SetUp() override {
    prepare({block_}, specs());
    path_ = file_of(block_);
    sound_ = testing::read_file(path_);
    data_ = sound_.substr(sound_.size() - 64);
    json_ = layout::testing::json_of(std::string_view(sound_).substr(0, sound_.size() - 64));
    ASSERT_NE(json_.find(kKeys), std::string::npos) << json_;
    ASSERT_NE(json_.find(kCodes), std::string::npos) << json_;
  }

  std::string edited(std::string_view from, std::string_view to) const {
    std::string json = json_;
    const auto at = json.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return json.replace(at, from.size(), to);
  }

  // Reads the block from a store of this one file, within the bounds that hold for every file.
  Gathered read(const std::string& file) {
    testing::write_file(path_, file);
    const auto store = open();
    mlx::core::reset_peak_memory();
    const std::size_t before = mlx::core::get_active_memory();
    largest = 0;
    const auto start = std::chrono::steady_clock::now();
    Gathered gathered = store->gather(testing::request_for({block_}));
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
    EXPECT_LE(largest, 4 * file.size() + 4096);
    EXPECT_LE(mlx::core::get_peak_memory() - before, file.size() + (64 << 10));
    if (!gathered.status.is_ok()) {
      EXPECT_EQ(store->stats().corrupt_parts, 1u) << gathered.status.message();
      EXPECT_FALSE(fs::exists(path_));
    }
    return gathered;
  }

  void expect_refused(const std::string& file, const std::string& what) {
    const Gathered gathered = read(file);
    EXPECT_EQ(gathered.status.code(), StatusCode::Corrupt) << what << ": " << gathered.status.message();
    EXPECT_TRUE(gathered.slots.empty()) << what;
  }
  void expect_refused_edit(const std::string& from, const std::string& to) {
    expect_refused(seal(edited(from, to)) + data_, to.substr(0, 200));
  }

  Block block_ = chain(1, 8)[0];
  fs::path path_;
  std::string sound_, data_, json_;
};

TEST_F(HostileFile, TheSealedFileIsTheSoundOne) {
  ASSERT_EQ(seal(json_) + data_, sound_);
  testing::expect_rows(read(sound_), {block_}, 0, 8, -1, specs());
}

TEST_F(HostileFile, LengthsOfTheHeader) {
  const auto length = [&](std::uint64_t value) {
    if (value == sound_.size() - 72) return;  // as it is
    std::string file = sound_;
    for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(value >> (8 * i));
    expect_refused(file, "a header of " + std::to_string(value) + " bytes");
  };
  const std::uint64_t size = sound_.size();
  for (int bit = 0; bit < 64; ++bit) {
    length(std::uint64_t{1} << bit);
    length((std::uint64_t{1} << bit) - 1);
    length(0 - (std::uint64_t{1} << bit));
    length((std::uint64_t{1} << bit) - 8);
  }
  for (const std::uint64_t value : {size, size - 8, size - 7, size - 136, size + 56, size - 64}) length(value);
  // A file without anything in it that says it is 64 MiB of header.
  std::string holes = sound_;
  for (std::size_t i = 0; i < 8; ++i) holes[i] = static_cast<char>(((std::uint64_t{64} << 20) - 8) >> (8 * i));
  expect_refused(holes, "64 MiB");
}

TEST_F(HostileFile, OffsetsThatOverlapOrLeaveTheFile) {
  const std::string keys(kKeys), codes(kCodes);
  for (const char* offsets :
       {"[0,64]", "[-48,0]", "[16,64]", "[48,0]", "[0,47]", "[1,49]", "[0,18446744073709551615]",
        "[18446744073709551568,18446744073709551616]", "[9223372036854775760,9223372036854775808]", "[0.0,48]", "[0]",
        "[0,48,64]", "[]", "null", "\"0,48\"", "[4.8e1,96]", "[00,48]", "[0,+48]"}) {
    expect_refused_edit("[0,48]", offsets);
  }
  // Both on the same bytes, the second on nothing, the second over the first's end, a hole.
  for (const char* offsets : {"[0,16]", "[64,64]", "[40,56]", "[50,66]", "[32,48]"}) {
    expect_refused_edit("[48,64]", offsets);
  }
  expect_refused(seal(edited(keys + "," + codes, codes + "," + keys)) + data_, "another order");
}

TEST_F(HostileFile, ShapesAndDtypes) {
  for (const char* shape : {"[9223372036854775808,6]", "[9223372036854775807,9223372036854775807]", "[-8,-6]", "[8,-6]",
                            "[48]", "[6,8]", "[8,3,3]", "[2147483648,6]", "[4294967296,4294967296]",
                            "[18446744073709551616]", "[8,6,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]", "[8.0,6]", "[8,]", "[]",
                            "[null]", "[[8,6]]", "[8,\"6\"]", "[1e1,6]", "[8,6,0]"}) {
    expect_refused_edit("\"U8\",\"shape\":[8,6]", std::string("\"U8\",\"shape\":") + shape);
  }
  for (const char* dtype : {"F64", "F8_E4M3", "C64", "", "u8", "U8\\u0000", "I128", "BF16", "F32", "STRING", "U4"}) {
    expect_refused_edit("\"U8\",\"shape\":[8,6]", std::string("\"") + dtype + "\",\"shape\":[8,6]");
  }
}

TEST_F(HostileFile, NamesTwiceReservedOrNotText) {
  const std::string listed = ":5:codes";
  const auto renamed = [&](const std::string& name, const std::string& json_name) {
    std::string json = edited(listed, ":" + std::to_string(name.size()) + ":" + json_name);
    const auto at = json.find("\"codes\"");
    return seal(json.replace(at, 7, "\"" + json_name + "\"")) + data_;
  };
  expect_refused(renamed("keys", "keys"), "twice");
  expect_refused(renamed("__metadata__", "__metadata__"), "reserved");
  for (const char* bytes : {"\xff", "\xc3\x28", "\xed\xa0\x80", "\xf8\x88\x80\x80\x80", "\xc0\x80", "\xe2\x82"}) {
    expect_refused(renamed(bytes, bytes), "not UTF-8");
  }
  expect_refused(renamed(std::string(257, 'n'), std::string(257, 'n')), "a long name");
  // The list and the entries disagree.
  expect_refused_edit("\"codes\":{", "\"coden\":{");
  expect_refused_edit(kCodes, std::string(kCodes) + "," + kCodes);
  expect_refused_edit(std::string(",") + kCodes, "");
}

TEST_F(HostileFile, NamesThatAreWaysOut) {
  testing::write_file(dir_ / "outside", "secret");
  for (const std::string name : {"../../outside", "/etc/passwd", "..", "./x", "a/../../../b", "%2e%2e/", "~"}) {
    std::string json = edited(":5:codes", ":" + std::to_string(name.size()) + ":" + name);
    const auto at = json.find("\"codes\"");
    const Gathered gathered = read(seal(json.replace(at, 7, "\"" + name + "\"")) + data_);
    // A name is a name: it reaches the caller, who asked for it or not, and no file system.
    ASSERT_TRUE(gathered.status.is_ok()) << gathered.status.message();
    EXPECT_EQ(gathered.slots[1].name, name);
  }
  EXPECT_EQ(testing::read_file(dir_ / "outside"), "secret");
  EXPECT_EQ(env_.stray_paths(options_.directory), std::vector<std::string>{});
}

TEST_F(HostileFile, DeepAndOtherJson) {
  for (const std::size_t depth : {2, 100, 100000}) {
    expect_refused(seal(std::string(depth, '[') + std::string(depth, ']')), "deep arrays");
    expect_refused_edit("\"shape\":[8,6]", "\"shape\":" + std::string(depth, '[') + std::string(depth, ']'));
    std::string objects;
    for (std::size_t i = 0; i < depth; ++i) objects += "{\"a\":";
    expect_refused_edit(kKeys, "\"keys\":" + objects + "1" + std::string(depth, '}'));
  }
  expect_refused_edit("{\"__metadata__\"", "{\"x\":1,\"__metadata__\"");
  expect_refused_edit("\"part\":\"kv\"", "\"part\":\"../kv\"");
  expect_refused_edit("\"part\":\"kv\"", "\"part\":\"win\"");
  expect_refused_edit("prefixcache.v1", "prefixcache.v2");
  expect_refused(seal("null"), "null");
  expect_refused(seal(""), "nothing");
  expect_refused(std::string(1 << 20, ' '), "spaces");
  expect_refused(std::string(1 << 20, '\xff'), "ones");
}

TEST_F(HostileFile, PositionsOfOtherBlocks) {
  expect_refused_edit("\"rows\":\"0:8\"", "\"rows\":\"8:16\"");
  expect_refused_edit("\"rows\":\"0:8\"", "\"rows\":\"0:9223372036854775807\"");
  expect_refused_edit("\"rows\":\"0:8\"", "\"rows\":\"8:0\"");
  expect_refused_edit("\"depth\":\"8\"", "\"depth\":\"16\"");
  expect_refused_edit("\"depth\":\"8\"", "\"depth\":\"9223372036854775808\"");
  expect_refused_edit(block_.key.hex(), chain(1, 8, 5)[0].key.hex());
  expect_refused_edit(block_.parent.hex(), chain(1, 8, 5)[0].key.hex());
}

// Tensors without bytes cost their file nothing, whatever their axes say: they must cost the reader nothing either.
TEST_F(HostileFile, HugeAxesWithoutBytes) {
  for (const std::string shape :
       {"[2147483647,8,0]", "[2147483647,0,8]", "[0,2147483647,2147483647]", "[2147483647,2147483647,0]"}) {
    for (const std::string axis : {"-1", "0", "1", "2"}) {
      std::string json = edited(kCodes, R"("codes":{"dtype":"U8","shape":)" + shape + R"(,"data_offsets":[48,48]})");
      const auto at = json.find(",0:", json.find("\"tensors\":"));
      ASSERT_NE(at, std::string::npos);
      // The digest of no bytes.
      json.replace(at, 1 + 2 + 16, "," + axis + ":2d06800538d394c2");
      const Gathered gathered = read(seal(json) + data_.substr(0, 48));
      if (!gathered.status.is_ok()) continue;
      EXPECT_EQ(gathered.slots[1].array.nbytes(), 0u) << shape << " axis " << axis;
    }
  }
}

TEST_F(HostileFile, WithoutRowsAndWithHugeAxes) {
  // No rows at all: load() asks for what the header says.
  std::string json = edited("\"rows\":\"0:8\"", "\"rows\":\"3:3\"");
  json.replace(json.find(kKeys), std::string(kKeys).size(),
               R"("keys":{"dtype":"U8","shape":[0,6],"data_offsets":[0,0]})");
  json.replace(json.find(kCodes), std::string(kCodes).size(),
               R"("codes":{"dtype":"U8","shape":[2147483647,2147483647,0],"data_offsets":[0,0]})");
  const auto list = json.find("\"tensors\":\"");
  json.replace(list, json.find("\"}", list) - list,
               R"("tensors":"0:2d06800538d394c2:4:keys,2:2d06800538d394c2:5:codes)");
  testing::write_file(path_, seal(json));
  const auto store = open();
  const auto start = std::chrono::steady_clock::now();
  const Gathered gathered = store->load(block_.key, Part::kv);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
  EXPECT_TRUE(gathered.status.is_ok()) << gathered.status.message();
}

TEST_F(HostileFile, RoomIsNotForAFileToAsk) {
  // One row of nothing, room for two thousand millions: more than an array can be.
  std::string json =
      edited(kCodes, R"("codes":{"dtype":"U8","shape":[0,2147483647,8,536870911],"data_offsets":[48,48]})");
  const auto at = json.find(",0:", json.find("\"tensors\":"));
  json.replace(at, 1 + 2 + 16, ",2:2d06800538d394c2");
  testing::write_file(path_, seal(json) + data_.substr(0, 48));
  const auto store = open();
  const Gathered gathered = store->gather(testing::request_for({block_}, 0, 8, 2147483647));
  EXPECT_EQ(gathered.status.code(), StatusCode::Full) << gathered.status.message();
}

TEST_F(HostileFile, MemoryThatPutCannotHaveIsFull) {
  const Block block = chain(1, 200'000, 1)[0];
  const auto spec = testing::one_state()[0];
  const std::vector<SlotInput> slots = {{spec.name, testing::array_of(spec, {block}, 0, 0), spec.seq_axis}};
  PutRequest request;
  request.key = block.key;
  request.parent = block.parent;
  request.depth = request.row_hi = block.depth;
  request.part = Part::state;
  request.tokens = block.tokens;
  request.slots = slots;
  const auto store = open();
  testing::most = 100'000;
  const Status status = store->put(request);
  testing::most = std::numeric_limits<std::size_t>::max();
  EXPECT_EQ(status.code(), StatusCode::Full) << status.message();
  EXPECT_EQ(store->stats().put_full, 1u);
  EXPECT_EQ(store->stats().queued_bytes, 0u);
  EXPECT_TRUE(store->put(request).is_ok());
  EXPECT_TRUE(store->flush().is_ok());
  EXPECT_TRUE(store->load(block.key, Part::state).status.is_ok());
}

TEST_F(HostileFile, ThingsThatAreNoFiles) {
  const fs::path folder = path_.parent_path();
  const auto miss = [&](const std::string& what) {
    const auto store = open();
    EXPECT_EQ(store->gather(testing::request_for({block_})).good, 0u) << what;
    EXPECT_EQ(found(*store, {block_}), 0u) << what;
    // What is put now is served, written or not.
    put_chain(*store, {block_}, specs());
    store->flush();
    const Gathered again = store->gather(testing::request_for({block_}));
    if (again.status.is_ok()) testing::expect_rows(again, {block_}, 0, 8, -1, specs());
    EXPECT_TRUE(store->clear().is_ok() || fs::is_directory(fs::symlink_status(path_))) << what;
    fs::remove_all(path_);
  };
  fs::remove(path_);
  fs::create_directory(path_);
  testing::write_file(path_ / "x", "mine");
  miss("a directory");
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  miss("a pipe");
  fs::create_symlink("/dev/zero", path_);
  miss("a link to a device");
  fs::create_symlink(dir_ / "nowhere", path_);
  miss("a link to nowhere");
  fs::create_symlink(path_.filename(), path_);
  miss("a link to itself");
  EXPECT_FALSE(fs::exists(dir_ / "nowhere"));
  EXPECT_EQ(env_.stray_paths(options_.directory), std::vector<std::string>{});
}

TEST_F(HostileFile, NamesInTheDirectory) {
  const fs::path folder = path_.parent_path();
  const std::string name = path_.filename();
  const std::string key = name.substr(0, 64);
  const std::string rest = name.substr(64);
  std::vector<std::string> names = {key + "-" + std::string(16, '0') + "-0.kv.safetensors",
                                    key + "-" + std::string(16, '0') + "-9223372036854775808.kv.safetensors",
                                    key + "-" + std::string(16, '0') + "--1.kv.safetensors",
                                    key + "-" + std::string(16, '0') + "-08.kv.safetensors",
                                    key + "-" + std::string(16, 'F') + "-8.kv.safetensors",
                                    key + "-" + std::string(16, '0') + "-8.KV.safetensors",
                                    key + "-" + std::string(16, '0') + "-8.kv.safetensors\n",
                                    std::string(64, 'g') + rest,
                                    std::string(255, 'a'),
                                    "\xff\xfe.kv.safetensors",
                                    ".safetensors",
                                    "-",
                                    " "};
  for (const auto& bad : names) testing::write_file(folder / bad, "x");
  // In a folder that is not its own, and one that claims the deepest place there is.
  fs::create_directory(folder.parent_path() / "zz");
  testing::write_file(folder.parent_path() / "zz" / name, sound_);
  testing::write_file(folder / (key.substr(0, 2) + std::string(62, 'a') + "-" + key.substr(0, 16) +
                                "-9223372036854775807.win.safetensors"),
                      "x");
  const auto store = open();
  testing::expect_rows(store->gather(testing::request_for({block_})), {block_}, 0, 8, -1, specs());
  EXPECT_EQ(store->stats().parts, 2u);
  EXPECT_EQ(store->children(block_.key).size(), 0u);
  EXPECT_EQ(store->stats().corrupt_parts, 1u);
  EXPECT_EQ(env_.stray_paths(options_.directory), std::vector<std::string>{});
}

}  // namespace
}  // namespace prefixcache
