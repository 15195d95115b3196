// A life of a store on a file system that fails at each of its calls in turn, in every way there is: no crash, no wrong
// row, counters that tell, and once the fault is over a store that works.
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "support/failing_env.h"
#include "support/full_size.h"
#include "support/store_fixture.h"

namespace prefixcache {
namespace {

namespace fs = std::filesystem;
using testing::Block;
using testing::Call;
using testing::chain;
using testing::FailingEnv;
using testing::Fault;

constexpr std::uint64_t kGroup = 77;
constexpr std::uint64_t kMostPart = 2048;

struct Trouble {
  const char* name;
  Fault fault;
  int number = EIO;
  bool lasting = false;
  bool mapped = true;
  Verify verify = Verify::first;
};

class StoreFaults : public ::testing::TestWithParam<Trouble> {
 protected:
  StoreFaults() {
    options_.name_space = "test";
    options_.threads = 1;
    options_.ram_bytes = 0;
    options_.disk_bytes = 9 * kMostPart;
    options_.put_wait_seconds = 0.1;
    options_.verify = GetParam().verify;
  }

  // What the counters of all stores of a life came to.
  struct Counted {
    std::uint64_t write_errors = 0;
    std::uint64_t bad_parts = 0;
    bool degraded_at_end = false;
  };

  std::unique_ptr<BlockStore> open(FailingEnv& env, const std::string& directory) {
    options_.env = &env;
    options_.directory = directory;
    env.refuse_to_map = !GetParam().mapped;
    return BlockStore::open(options_);
  }

  // Whatever is served is what was stored.
  void look(BlockStore& store) {
    for (const auto* blocks : {&first_, &second_, &tail_}) {
      const auto size = blocks->front().depth - blocks->front().start();
      const auto found = store.longest_prefix(keys_of(*blocks), blocks->front().parent, size, Part::kv);
      if (found == 0) continue;
      const std::vector<Block> prefix(blocks->begin(), blocks->begin() + static_cast<long>(found));
      const Gathered gathered = store.gather(testing::request_for(prefix));
      if (gathered.status.is_ok()) {
        testing::expect_rows(gathered, prefix, prefix[0].start(), prefix.back().depth);
      } else {
        EXPECT_LT(gathered.good, found);
      }
    }
    Gathered state = store.load(first_[1].key, Part::state);
    if (state.status.is_ok()) testing::expect_rows(state, {first_[1]}, 0, 16, -1, testing::one_state());
    auto request = testing::request_for({first_[1]}, 10, 16);
    request.part = Part::win;
    request.group = kGroup;
    const Gathered window = store.gather(request);
    if (window.status.is_ok()) testing::expect_rows(window, {first_[1]}, 10, 16);
    store.children(first_[0].key);
    store.deepest_state({testing::test_root(), {}, 8, first_[0].tokens, {}}, 8);
  }

  void put_all(BlockStore& store) {
    const auto settled = [&](const Status& status) {
      EXPECT_TRUE(status.is_ok() || status.code() == StatusCode::Full) << status.message();
      store.flush();
      EXPECT_LE(bytes_below(options_.directory), options_.disk_bytes + kMostPart);
    };
    for (const auto& block : first_) settled(put_block(store, block));
    settled(put_window(store, first_[1], 10, 16, kGroup));
    settled(put_state(store, first_[1]));
    settled(put_block(store, tail_[0]));
  }

  void finish(BlockStore& store, Counted& counted) {
    store.flush();
    const StoreStats stats = store.stats();
    counted.write_errors += stats.write_errors;
    counted.bad_parts += stats.corrupt_parts + stats.lost_parts;
    counted.degraded_at_end = stats.degraded;
    EXPECT_TRUE(stats.write_errors == 0 || !stats.last_error.empty());
    store.close();
  }

  // Stores, reads, forgets, evicts, opens again, clears.
  Counted live(FailingEnv& env, const std::string& directory) {
    Counted counted;
    {
      const auto store = open(env, directory);
      put_all(*store);
      look(*store);
      store->erase(std::vector<Key>{first_[2].key}, std::vector<Part>{Part::kv});
      put_block(*store, first_[2]);
      store->flush();
      look(*store);
      finish(*store, counted);
    }
    {
      const auto store = open(env, directory);
      look(*store);
      // More than there is room for.
      for (const auto& block : second_) {
        put_block(*store, block);
        store->flush();
        EXPECT_LE(bytes_below(directory), options_.disk_bytes + kMostPart);
      }
      look(*store);
      finish(*store, counted);
    }
    {
      const auto store = open(env, directory);
      look(*store);
      store->clear();
      look(*store);
      put_all(*store);
      finish(*store, counted);
    }
    return counted;
  }

  // The fault is over: nothing wrong is there, and everything can be stored and found again.
  void recover(const std::string& directory) {
    FailingEnv sound;
    // Long enough for leftovers of writes to be taken for what they are.
    sound.clock_offset = options_.temp_grace_seconds + 60;
    const auto store = open(sound, directory);
    look(*store);
    // On a busy machine the directory is still being listed.
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (store->stats().disk_bytes != bytes_below(directory) && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_EQ(store->stats().disk_bytes, bytes_below(directory));
    EXPECT_LE(bytes_below(directory), options_.disk_bytes);
    EXPECT_EQ(leftovers_below(directory), 0u);
    EXPECT_FALSE(store->stats().degraded) << store->stats().last_error;
    EXPECT_TRUE(store->clear().is_ok());
    put_all(*store);
    EXPECT_TRUE(store->flush().is_ok());
    testing::expect_chain(*store, first_);
    EXPECT_TRUE(store->load(first_[1].key, Part::state).status.is_ok());
    EXPECT_EQ(store->stats().write_errors, 0u);
    EXPECT_EQ(store->stats().disk_bytes, bytes_below(directory));
  }

  // But for the file in which stores count them.
  static std::uint64_t bytes_below(const fs::path& directory) {
    std::uint64_t sum = 0;
    if (!fs::exists(directory)) return 0;
    for (const auto& item : fs::recursive_directory_iterator(directory)) {
      if (item.is_regular_file() && item.path().filename() != ".usage") sum += item.file_size();
    }
    return sum;
  }

  static std::size_t leftovers_below(const fs::path& directory) {
    std::size_t count = 0;
    if (!fs::exists(directory)) return 0;
    for (const auto& item : fs::recursive_directory_iterator(directory)) {
      count += item.path().filename().string().starts_with(".tmp-") ? 1 : 0;
    }
    return count;
  }

  testing::TempDir dir_;
  Options options_;
  std::vector<Block> first_ = chain(4, 8), second_ = chain(5, 8, 1);
  std::vector<Block> tail_ = {testing::tail_of(chain(1, 8, 9, first_[3].key, first_[3].depth)[0], 3)};
};

TEST_P(StoreFaults, AtEveryCall) {
  FailingEnv sound;
  const Counted without = live(sound, dir_ / "sound");
  EXPECT_EQ(without.write_errors + without.bad_parts, 0u);
  const std::vector<Call> calls = sound.calls();
  ASSERT_GT(calls.size(), 50u);
  const Trouble& trouble = GetParam();
  std::size_t tried = 0;
  std::uint64_t bad_parts = 0;
  // Each kind of trouble begins elsewhere, so that together they meet every call in the short form too.
  const bool every = testing::at_full_size() || trouble.fault == Fault::slow;
  const std::size_t step = every ? 1 : trouble.fault == Fault::error ? 15 : 3;
  for (std::size_t at = 1 + std::string_view(trouble.name).size() % step; at <= calls.size(); at += step) {
    if (!FailingEnv::can_fail(calls[at - 1], trouble.fault)) continue;
    if (trouble.fault == Fault::slow && at > 1) break;  // from the first call on
    SCOPED_TRACE("call " + std::to_string(at));
    const std::string directory = dir_ / std::to_string(at);
    FailingEnv env;
    env.arm(trouble.fault, trouble.number, at, trouble.lasting);
    const Counted counted = live(env, directory);
    ++tried;
    bad_parts += counted.bad_parts;
    const bool told = trouble.fault == Fault::error || trouble.fault == Fault::short_write;
    // Once the folder was gone it is made, and the write is tried again.
    if ((told && trouble.number != ENOENT) || trouble.fault == Fault::late_rename) {
      const std::size_t refused = env.failed(Call::write) + env.failed(Call::rename);
      EXPECT_TRUE(refused == 0 || counted.write_errors > 0) << refused << " refused";
    }
    EXPECT_LE(bytes_below(directory), options_.disk_bytes + kMostPart);
    recover(directory);
    if (HasFailure()) break;
    fs::remove_all(directory);
  }
  EXPECT_GT(tried, 0u);
  const bool damages = trouble.fault != Fault::error && trouble.fault != Fault::slow &&
                       trouble.fault != Fault::short_write && trouble.fault != Fault::late_rename;
  EXPECT_TRUE(!damages || bad_parts > 0) << "what was damaged was never noticed";
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, StoreFaults,
    ::testing::Values(Trouble{"Eio", Fault::error, EIO}, Trouble{"EioFromThenOn", Fault::error, EIO, true},
                      Trouble{"NoSpace", Fault::error, ENOSPC},
                      Trouble{"NoSpaceFromThenOn", Fault::error, ENOSPC, true},
                      Trouble{"Refused", Fault::error, EACCES},
                      Trouble{"RefusedFromThenOn", Fault::error, EACCES, true}, Trouble{"Gone", Fault::error, ENOENT},
                      Trouble{"GoneFromThenOn", Fault::error, ENOENT, true}, Trouble{"ReadOnly", Fault::error, EROFS},
                      Trouble{"ReadOnlyFromThenOn", Fault::error, EROFS, true},
                      Trouble{"Unmapped", Fault::error, EIO, false, false}, Trouble{"Slow", Fault::slow, 1, true},
                      Trouble{"ShortWrite", Fault::short_write, ENOSPC},
                      Trouble{"ShortWrites", Fault::short_write, ENOSPC, true}, Trouble{"LostData", Fault::lost_data},
                      Trouble{"TornRename", Fault::torn_rename}, Trouble{"LateRename", Fault::late_rename},
                      Trouble{"LostRename", Fault::lost_rename}, Trouble{"LostRenames", Fault::lost_rename, 0, true},
                      Trouble{"BadRead", Fault::bad_read, 0, false, false, Verify::always},
                      Trouble{"BadReadOfHeader", Fault::bad_read}, Trouble{"CutMap", Fault::cut_map}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace prefixcache
