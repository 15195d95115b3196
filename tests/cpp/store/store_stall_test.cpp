// A disk that stops answering: callers are held for the stated time at most, and all is well again by itself.
#include <chrono>
#include <functional>
#include <thread>

#include <gtest/gtest.h>

#include "store/store_handle.h"
#include "support/stalling_env.h"
#include "support/store_fixture.h"

namespace prefixcache {
namespace {

using std::chrono::steady_clock;
using testing::chain;
using testing::expect_chain;
using testing::kPage;
using testing::one_page;
using testing::put_block;
using testing::put_chain;
using testing::request_for;

class StoreStall : public testing::StoreFixture {
 protected:
  StoreStall() {
    options_.env = &disk_;
    options_.disk_wait_seconds = 0.2;
    options_.put_wait_seconds = 0.1;
  }
  ~StoreStall() override { disk_.let_go(); }

  // A busy machine may take longer for either than the test's bounds.
  std::unique_ptr<BlockStore> open_and_wait(std::size_t parts) {
    auto store = open();
    EXPECT_TRUE(soon([&] { return store->stats().parts == parts && !store->stats().degraded; }));
    return store;
  }
  static double seconds(const std::function<void()>& call) {
    const auto start = steady_clock::now();
    call();
    return std::chrono::duration<double>(steady_clock::now() - start).count();
  }
  // Far above the bounds, for a machine that has other things to do; far below what a stall would take.
  static constexpr double kBound = 20;

  testing::StallingEnv disk_;
};

TEST_F(StoreStall, ALookupIsAMissInTime) {
  const auto blocks = chain(3, 4), unknown = chain(2, 4, 1);
  prepare(blocks, one_page());
  const auto store = open_and_wait(3);
  disk_.stall("stat");
  EXPECT_LT(seconds([&] { EXPECT_EQ(found(*store, unknown), 0u); }), kBound);
  EXPECT_EQ(disk_.waiting(), 1);
  EXPECT_TRUE(store->stats().degraded);
  EXPECT_FALSE(store->stats().last_error.empty());
  // Nobody else begins to wait.
  EXPECT_LT(seconds([&] {
              for (int i = 0; i < 1000; ++i) EXPECT_EQ(found(*store, unknown), 0u);
            }),
            kBound);
  EXPECT_EQ(found(*store, blocks), 3u) << "the index knows";
  disk_.let_go();
  EXPECT_TRUE(soon([&] { return !store->stats().degraded; }));
  expect_chain(*store, blocks, one_page());
}

TEST_F(StoreStall, AReadIsAMissInTimeAndTheNextOneIsRight) {
  const auto blocks = chain(3, 4);
  prepare(blocks, one_page());
  for (const char* call : {"open", "read"}) {
    const auto store = open_and_wait(3);
    disk_.stall(call);
    EXPECT_LT(seconds([&] {
                const auto gathered = store->gather(request_for(blocks));
                EXPECT_EQ(gathered.status.code(), StatusCode::IOError);
                EXPECT_EQ(gathered.status.error_number(), ETIMEDOUT);
                EXPECT_EQ(gathered.good, 0u);
                EXPECT_TRUE(gathered.slots.empty());
                EXPECT_EQ(store->load(blocks[0].key, Part::kv).status.error_number(), ETIMEDOUT);
                EXPECT_TRUE(store->children(testing::test_root()).empty());
              }),
              kBound);
    EXPECT_TRUE(store->stats().degraded);
    disk_.let_go();
    EXPECT_TRUE(soon([&] { return !store->stats().degraded; }));
    expect_chain(*store, blocks, one_page());
    EXPECT_EQ(store->stats().corrupt_parts + store->stats().lost_parts, 0u);
  }
}

TEST_F(StoreStall, AReadThatStallsInTheMiddleLeavesWhatItUsesAlone) {
  const auto blocks = chain(3, 4);
  prepare(blocks, one_page());
  const auto store = open_and_wait(3);
  expect_chain(*store, blocks, one_page());  // all are open
  disk_.stall("read");
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(store->gather(request_for(blocks)).status.error_number(), ETIMEDOUT);
  }
  EXPECT_GT(disk_.waiting(), 0);
  disk_.let_go();
  EXPECT_TRUE(soon([&] { return !store->stats().degraded; }));
  for (int i = 0; i < 3; ++i) expect_chain(*store, blocks, one_page());
}

TEST_F(StoreStall, RamServesMeanwhile) {
  options_.ram_bytes = 64 * kPage;
  const auto on_disk = chain(2, 4, 1);
  prepare(on_disk, one_page());
  const auto store = open_and_wait(2);
  const auto blocks = chain(4, 4);
  put_chain(*store, blocks, one_page());
  ASSERT_TRUE(store->flush().is_ok());
  disk_.stall("open");
  EXPECT_FALSE(store->gather(request_for(on_disk)).status.is_ok());
  expect_chain(*store, blocks, one_page());
  disk_.let_go();
}

TEST_F(StoreStall, PutsGoOnInRamAndReachTheDiskLater) {
  options_.ram_bytes = 64 * kPage;
  options_.queue_bytes = 3 * kPage;
  for (const char* call : {"write", "rename", "lock"}) {
    const auto store = open_and_wait(0);
    disk_.stall(call);
    const auto blocks = chain(12, 4, static_cast<std::uint32_t>(call[0]));
    std::size_t kept = 0;
    for (const auto& block : blocks) {
      double held = 0;
      Status status;
      // Full, until the store knows that the disk has stalled.
      for (int i = 0; i < 100 && (i == 0 || status.code() == StatusCode::Full); ++i) {
        held = std::max(held, seconds([&] { status = put_block(*store, block, one_page()); }));
      }
      EXPECT_LT(held, kBound);
      kept += status.is_ok() ? 1 : 0;
    }
    EXPECT_EQ(kept, blocks.size());
    EXPECT_TRUE(store->stats().degraded);
    expect_chain(*store, blocks, one_page());
    disk_.let_go();
    EXPECT_TRUE(soon([&] { return !store->stats().degraded; }));
    ASSERT_TRUE(store->flush().is_ok());
    EXPECT_EQ(store->stats().written_parts, blocks.size());
    ASSERT_TRUE(store->clear().is_ok());
  }
}

TEST_F(StoreStall, RemovalsSayThatTheyDidNotEnd) {
  const auto store = open_and_wait(0);
  const auto blocks = chain(2, 4);
  put_chain(*store, blocks, one_page());
  ASSERT_TRUE(store->flush().is_ok());
  disk_.stall("remove");
  const std::vector<Part> kv = {Part::kv};
  EXPECT_EQ(store->erase(testing::keys_of(blocks), kv).error_number(), ETIMEDOUT);
  EXPECT_LT(seconds([&] { EXPECT_TRUE(store->stats().degraded); }), kBound) << "whoever asks how it is gets an answer";
  disk_.let_go();
  EXPECT_TRUE(soon([&] { return dir_.parts().empty(); }));
  EXPECT_TRUE(soon([&] { return store->stats().disk_bytes == 0; }));
}

TEST_F(StoreStall, AStoreServesWhileItsDirectoryIsListed) {
  const auto blocks = chain(3, 4), more = chain(2, 4, 1);
  prepare(blocks, one_page());
  disk_.stall("list");
  std::unique_ptr<BlockStore> store;
  EXPECT_LT(seconds([&] { store = open(); }), kBound);
  EXPECT_EQ(store->stats().parts, 0u);
  EXPECT_EQ(found(*store, blocks), 3u) << "the file system knows";
  expect_chain(*store, blocks, one_page());
  disk_.let_go();
  put_chain(*store, more, one_page());
  ASSERT_TRUE(store->flush().is_ok());
  EXPECT_EQ(store->stats().parts, 5u);
  EXPECT_EQ(store->stats().disk_bytes, dir_.bytes());
}

TEST_F(StoreStall, ADirectoryThatDoesNotAnswerAtOpenIsUsedLater) {
  const auto blocks = chain(2, 4);
  prepare(blocks, one_page());
  disk_.stall("stat");
  std::unique_ptr<BlockStore> store;
  EXPECT_LT(seconds([&] { store = open(); }), kBound);
  EXPECT_TRUE(store->stats().degraded);
  EXPECT_EQ(found(*store, blocks), 0u);
  disk_.let_go();
  EXPECT_TRUE(soon([&] { return store->stats().parts == 2 && !store->stats().degraded; }));
  expect_chain(*store, blocks, one_page());
}

// Puts wait for memory that a gather holds, and give up in time.
TEST_F(StoreStall, APutWaitsForMemoryThatIsBeingRead) {
  options_.write = WritePolicy::through;
  options_.ram_bytes = 2 * kPage;
  options_.disk_wait_seconds = 60;
  options_.put_wait_seconds = 0.2;
  const auto first = chain(1, 4);
  prepare(first, one_page());
  const auto store = open_and_wait(1);
  const auto second = chain(2, 4, 0, first[0].key, 4);
  put_chain(*store, second, one_page());
  ASSERT_TRUE(store->flush().is_ok());
  ASSERT_EQ(store->stats().parts_in_ram, 2u);
  disk_.stall("read");
  std::thread reader([&] { expect_chain(*store, {first[0], second[0], second[1]}, one_page()); });
  EXPECT_TRUE(soon([&] { return disk_.waiting() > 0; }));
  const auto other = chain(1, 4, 9)[0];
  const double held = seconds([&] { EXPECT_EQ(put_block(*store, other, one_page()).code(), StatusCode::Full); });
  EXPECT_GE(held, 0.19);
  EXPECT_LT(held, kBound);
  EXPECT_EQ(store->stats().parts_in_ram, 2u) << "evicting what is read makes no room";
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    disk_.let_go();
  });
  EXPECT_TRUE(put_block(*store, other, one_page()).is_ok() || put_block(*store, other, one_page()).is_ok());
  later.join();
  reader.join();
}

class StoreStallAtTheEnd : public StoreStall {
 protected:
  StoreStallAtTheEnd() {
    options_.flush_wait_seconds = 0.2;
    options_.ram_bytes = 64 * kPage;
  }
  // Outlives whatever still hangs in it.
  std::unique_ptr<BlockStore> open_on_its_own() {
    static auto& disks = *new std::vector<std::unique_ptr<testing::StallingEnv>>;
    lasting_ = disks.emplace_back(std::make_unique<testing::StallingEnv>()).get();
    options_.env = lasting_;
    return reopen();
  }

  std::unique_ptr<BlockStore> reopen() {
    return std::make_unique<store::StoreHandle>(std::make_unique<store::StoreImpl>(options_), false);
  }
  void expect_chain_up_to(BlockStore& store, std::size_t count) {
    if (count == 0) return;
    expect_chain(store, {blocks_.begin(), blocks_.begin() + static_cast<long>(count)}, one_page());
  }

  testing::StallingEnv* lasting_ = nullptr;
  const std::vector<testing::Block> blocks_ = chain(5, 4);
};

TEST_F(StoreStallAtTheEnd, AFlushGivesUpAndTheNextOneEnds) {
  for (const char* call : {"write", "rename", "lock"}) {
    const auto store = open_and_wait(0);
    disk_.stall(call);
    put_chain(*store, blocks_, one_page());
    EXPECT_LT(seconds([&] { EXPECT_EQ(store->flush().error_number(), ETIMEDOUT); }), kBound) << call;
    expect_chain(*store, blocks_, one_page());
    disk_.let_go();
    EXPECT_TRUE(soon([&] { return store->flush().is_ok() && !store->stats().degraded; }));
    EXPECT_EQ(store->stats().written_parts, 5u);
    EXPECT_EQ(store->stats().write_errors, 0u);
    EXPECT_EQ(dir_.parts().size(), 5u);
    ASSERT_TRUE(store->clear().is_ok());
  }
}

TEST_F(StoreStallAtTheEnd, AClosedStoreSaysWhatIsLost) {
  for (const auto policy : {WritePolicy::through, WritePolicy::back}) {
    for (const char* call : {"write", "rename", "lock"}) {
      options_.write = policy;
      std::filesystem::remove_all(options_.directory);
      auto store = open_and_wait(0);
      disk_.stall(call);
      put_chain(*store, blocks_, one_page());
      Status status;
      EXPECT_LT(seconds([&] { status = store->close(); }), kBound) << call;
      EXPECT_EQ(status.code(), StatusCode::IOError);
      EXPECT_EQ(status.error_number(), ETIMEDOUT);
      EXPECT_NE(status.message().find("5 parts were not written"), std::string::npos) << status.message();
      EXPECT_EQ(store->stats().write_errors, 5u);
      EXPECT_EQ(put_block(*store, blocks_[0]).code(), StatusCode::Closed);
      EXPECT_TRUE(store->close().is_ok());
      disk_.let_go();
      store.reset();  // waits: the file system is the test's
      // What was under its own name by then is whole; no other part was begun.
      EXPECT_LE(dir_.parts().size(), std::string_view(call) == "rename" ? 1u : 0u) << call;
      EXPECT_EQ(dir_.files().size(), dir_.parts().size()) << call;
      store = open_and_wait(dir_.parts().size());
      EXPECT_EQ(store->stats().disk_bytes, dir_.bytes());
      expect_chain_up_to(*store, found(*store, blocks_));
    }
  }
}

TEST_F(StoreStallAtTheEnd, NothingIsLostWhereNothingWaits) {
  prepare(blocks_, one_page());
  disk_.stall("list");
  const auto store = open();
  EXPECT_LT(seconds([&] { EXPECT_TRUE(store->close().is_ok()); }), kBound);
  EXPECT_EQ(store->stats().write_errors, 0u);
  disk_.let_go();
}

TEST_F(StoreStallAtTheEnd, ADestroyedStoreLeavesWhatHangsBehind) {
  for (const char* call : {"write", "rename", "lock", "list"}) {
    std::filesystem::remove_all(options_.directory);
    auto store = open_on_its_own();
    put_chain(*store, chain(1, 4, 7), one_page());
    ASSERT_TRUE(store->flush().is_ok());
    lasting_->stall(call);
    if (std::string_view(call) == "list") store = reopen();
    put_chain(*store, blocks_, one_page());
    EXPECT_LT(seconds([&] { store = nullptr; }), kBound) << call;
    EXPECT_GT(lasting_->waiting(), 0) << call;
    // Another one on the same directory meanwhile, and afterwards.
    auto* const hanging = lasting_;
    auto next = open_on_its_own();
    put_chain(*next, blocks_, one_page());
    ASSERT_TRUE(next->flush().is_ok());
    hanging->let_go();
    EXPECT_TRUE(soon([&] { return hanging->waiting() == 0; }));
    EXPECT_TRUE(soon([&] { return dir_.files().size() == dir_.parts().size(); }));
    expect_chain(*next, blocks_, one_page());
    ASSERT_TRUE(next->close().is_ok());
    next = open_on_its_own();
    EXPECT_TRUE(soon([&] { return next->stats().parts == 6; })) << call;
    expect_chain(*next, blocks_, one_page());
  }
}

TEST_F(StoreStallAtTheEnd, AReadThatHangsIsLeftBehindToo) {
  prepare(blocks_, one_page());
  auto store = open_on_its_own();
  EXPECT_TRUE(soon([&] { return store->stats().parts == 5; }));
  lasting_->stall("read");
  EXPECT_FALSE(store->gather(request_for(blocks_)).status.is_ok());
  EXPECT_LT(seconds([&] { store = nullptr; }), kBound);
  EXPECT_GT(lasting_->waiting(), 0);
  lasting_->let_go();
  EXPECT_TRUE(soon([&] { return lasting_->waiting() == 0; }));
}

}  // namespace
}  // namespace prefixcache
