// Where a sequence can be taken up: windows of rows, states, and where others leave it.
#include "prefixcache/block_store.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "support/store_fixture.h"

namespace prefixcache {
namespace {

namespace fs = std::filesystem;
using testing::Block;
using testing::block_under;
using testing::chain;
using testing::kPage;
using testing::one_page;
using testing::put_block;
using testing::put_chain;
using testing::put_state;
using testing::test_root;

constexpr std::uint64_t kGroup = 0x1234567890abcdef;

std::vector<std::uint32_t> tokens_of(const std::vector<Block>& blocks) {
  std::vector<std::uint32_t> tokens;
  for (const auto& block : blocks) tokens.insert(tokens.end(), block.tokens.begin(), block.tokens.end());
  return tokens;
}

struct Sequence {
  explicit Sequence(std::vector<Block> whole)
      : blocks(std::move(whole)), keys(keys_of(blocks)), tokens(tokens_of(blocks)) {}
  ChainView view() const { return {test_root(), keys, size(), tokens, {}}; }
  std::int64_t size() const { return static_cast<std::int64_t>(blocks[0].tokens.size()); }
  std::int64_t length() const { return static_cast<std::int64_t>(tokens.size()); }
  // The block or tail that ends at `n`.
  Block ending_at(std::int64_t n) const {
    const auto i = static_cast<std::size_t>((n - 1) / size());
    return blocks[i].depth == n ? blocks[i] : testing::tail_of(blocks[i], n - blocks[i].start());
  }

  std::vector<Block> blocks;
  std::vector<Key> keys;
  std::vector<std::uint32_t> tokens;
};

Status put_rows(BlockStore& store, const Block& block, std::int64_t lo, std::int64_t hi, std::uint64_t group = kGroup,
                std::uint64_t* added = nullptr) {
  return testing::put_window(store, block, lo, hi, group, testing::two_slots(), added);
}

PartInfo window_info(const BlockStore& store, const Block& block, std::uint64_t group = kGroup) {
  return store.presence(std::vector<Key>{group_key(block.key, group)})[0].parts[static_cast<int>(Part::win)];
}

class StorePoints : public testing::StoreFixture {
 protected:
  std::uint64_t file_bytes() const {
    std::uint64_t sum = 0;
    for (const auto& path : dir_.parts()) sum += fs::file_size(path);
    return sum;
  }
};

TEST_F(StorePoints, TheWindowThatReachesFurthest) {
  std::mt19937 random(3);
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 40; ++round) {
    options_.directory = dir_ / ("store" + std::to_string(round));
    auto store = open();
    const Sequence sequence(chain(8, 4, static_cast<std::uint32_t>(round)));
    const WindowReach reach{1 + below(14), 0, kGroup};
    std::set<std::int64_t> rows;  // stored, of blocks that are whole
    std::vector<std::pair<std::int64_t, std::int64_t>> tails;
    for (const auto& block : sequence.blocks) {
      const auto kind = below(5);
      if (kind == 0) continue;
      // Now and then only the last rows of a block, or only a tail of it.
      const std::int64_t lo = block.start() + (kind == 1 ? below(4) : 0);
      const std::int64_t hi = kind == 2 ? block.start() + 1 + below(3) : block.depth;
      ASSERT_TRUE(put_rows(*store, sequence.ending_at(hi), lo, hi).is_ok());
      if (hi < block.depth) {
        tails.emplace_back(lo, hi);
      } else {
        for (std::int64_t row = lo; row < hi; ++row) rows.insert(row);
      }
    }
    const auto usable = [&](std::int64_t n) {
      auto all = rows;
      for (const auto& [lo, hi] : tails) {
        // A tail serves only an n that lies in it: the block after it has another parent.
        for (std::int64_t row = lo; row < hi && (n - 1) / 4 == lo / 4; ++row) all.insert(row);
      }
      for (std::int64_t row = reach.first_row(n); row < n; ++row) {
        if (!all.contains(row)) return false;
      }
      return true;
    };
    for (int pass = 0; pass < 2; ++pass) {
      for (std::int64_t limit = 0; limit <= sequence.length() + 2; ++limit) {
        std::int64_t wanted = std::min(limit, sequence.length());
        while (wanted > 0 && !usable(wanted)) --wanted;
        const Point point = store->deepest_window(sequence.view(), reach, limit);
        ASSERT_EQ(point.n, wanted) << "round " << round << " pass " << pass << " limit " << limit;
        if (wanted == 0) continue;
        // And what it points to can be gathered.
        GatherRequest request;
        request.part = Part::win;
        request.group = kGroup;
        request.row_lo = reach.first_row(wanted);
        request.row_hi = wanted;
        request.capacity = wanted - request.row_lo;
        for (std::int64_t i = request.row_lo / 4; i < (wanted - 1) / 4; ++i) {
          request.keys.push_back(sequence.keys[static_cast<std::size_t>(i)]);
        }
        request.keys.push_back(point.last);
        const auto gathered = store->gather(request);
        ASSERT_TRUE(gathered.status.is_ok()) << gathered.status.message();
      }
      // Again with the rows of files that nobody has read yet.
      ASSERT_TRUE(store->close().is_ok());
      store = open();
    }
  }
}

TEST_F(StorePoints, KeptRowsAreNotAskedFor) {
  const auto store = open();
  const Sequence sequence(chain(6, 4));
  for (std::size_t i = 3; i < 6; ++i) {
    const Block& block = sequence.blocks[i];
    ASSERT_TRUE(put_rows(*store, block, block.start(), block.depth).is_ok());
  }
  // 12 rows are there: a window of 14 that keeps 2 needs no more.
  EXPECT_EQ(store->deepest_window(sequence.view(), {14, 2, kGroup}, 24).n, 24);
  EXPECT_EQ(store->deepest_window(sequence.view(), {14, 1, kGroup}, 24).n, 0);
}

TEST_F(StorePoints, TheStateThatReachesFurthest) {
  std::mt19937 random(5);
  for (int round = 0; round < 20; ++round) {
    options_.directory = dir_ / ("store" + std::to_string(round));
    auto store = open();
    const Sequence sequence(chain(6, 4, static_cast<std::uint32_t>(round)));
    const Sequence other(chain(6, 4, static_cast<std::uint32_t>(round) + 1000));
    std::set<std::int64_t> states;
    for (int i = 0; i < 5; ++i) {
      const auto n = 1 + static_cast<std::int64_t>(random() % 24);
      ASSERT_TRUE(put_state(*store, sequence.ending_at(n)).is_ok());
      states.insert(n);
      // States of others, some of which part from this sequence within a block.
      const Block own = sequence.ending_at(1 + static_cast<std::int64_t>(random() % 24));
      auto changed = own.tokens;
      changed.back() ^= 0x10000;
      ASSERT_TRUE(put_state(*store, block_under(own.parent, own.start(), changed)).is_ok());
      ASSERT_TRUE(put_state(*store, other.ending_at(n)).is_ok());
    }
    for (int pass = 0; pass < 2; ++pass) {
      for (std::int64_t limit = 0; limit <= 26; ++limit) {
        const auto above = states.upper_bound(limit);
        const std::int64_t wanted = above == states.begin() ? 0 : *std::prev(above);
        const Point point = store->deepest_state(sequence.view(), limit);
        ASSERT_EQ(point.n, wanted) << "round " << round << " pass " << pass << " limit " << limit;
        if (wanted == 0) continue;
        const Block block = sequence.ending_at(wanted);
        EXPECT_EQ(point.last, block.key);
        testing::expect_rows(store->load(point.last, Part::state), {block}, block.start(), block.depth, -1,
                             testing::one_state());
      }
      ASSERT_TRUE(store->close().is_ok());
      store = open();
    }
  }
}

TEST_F(StorePoints, WhereOthersLeave) {
  const auto store = open();
  const Sequence sequence(chain(4, 4));
  put_chain(*store, sequence.blocks);
  const auto view = sequence.view();
  EXPECT_EQ(store->deepest_fork(view, 16), 0);
  // What ends within the sequence, or goes on behind it, does not leave it.
  ASSERT_TRUE(put_state(*store, sequence.ending_at(6)).is_ok());
  ASSERT_TRUE(put_block(*store, chain(1, 4, 9, sequence.keys.back(), 16)[0]).is_ok());
  EXPECT_EQ(store->deepest_fork(view, 16), 0);

  const auto leave_at = [&](std::int64_t n) {
    Block own = sequence.ending_at((n / 4 + 1) * 4);
    own.tokens[static_cast<std::size_t>(n % 4)] ^= 0x10000;
    ASSERT_TRUE(put_block(*store, block_under(own.parent, own.start(), own.tokens)).is_ok());
  };
  leave_at(5);
  EXPECT_EQ(store->deepest_fork(view, 16), 5);
  leave_at(8);
  EXPECT_EQ(store->deepest_fork(view, 16), 8);
  EXPECT_EQ(store->deepest_fork(view, 8), 5);
  EXPECT_EQ(store->deepest_fork(view, 5), 0);
  EXPECT_EQ(store->deepest_fork(view, 0), 0);
}

TEST_F(StorePoints, GroupsKeepTheirRowsApart) {
  auto store = open();
  const Block block = chain(1, 8)[0];
  ASSERT_TRUE(put_rows(*store, block, 0, 8, 1).is_ok());
  ASSERT_TRUE(put_rows(*store, block, 6, 8, 2).is_ok());
  ASSERT_TRUE(put_block(*store, block).is_ok());
  for (int pass = 0; pass < 2; ++pass) {
    const Sequence sequence({block});
    EXPECT_EQ(store->deepest_window(sequence.view(), {8, 0, 1}, 8).n, 8);
    EXPECT_EQ(store->deepest_window(sequence.view(), {8, 0, 2}, 8).n, 0);
    EXPECT_EQ(store->deepest_window(sequence.view(), {2, 0, 2}, 8).n, 8);
    EXPECT_EQ(store->deepest_window(sequence.view(), {2, 0, 3}, 8).n, 0);
    ASSERT_TRUE(store->close().is_ok());
    store = open();
  }
  EXPECT_EQ(group_key(group_key(block.key, 7), 7), block.key);
  EXPECT_EQ(group_key(block.key, 0), block.key);
}

TEST_F(StorePoints, AFullerPartTakesThePlaceOfANarrowerOne) {
  for (const auto write : {WritePolicy::through, WritePolicy::ram_only}) {
    options_.write = write;
    options_.ram_bytes = write == WritePolicy::ram_only ? 1 << 20 : 0;
    auto store = open();
    const Block block = chain(1, 8, write == WritePolicy::through ? 0 : 1)[0];
    std::uint64_t added = 0;
    ASSERT_TRUE(put_rows(*store, block, 5, 8, kGroup, &added).is_ok());
    EXPECT_GT(added, 0u);
    ASSERT_TRUE(put_rows(*store, block, 6, 8, kGroup, &added).is_ok());
    EXPECT_EQ(added, 0u);
    if (write == WritePolicy::through) {
      // The file's rows are not known before its header is read; they must not pass for the whole block.
      ASSERT_TRUE(store->close().is_ok());
      store = open();
    }
    ASSERT_TRUE(put_rows(*store, block, 2, 8, kGroup, &added).is_ok());
    EXPECT_GT(added, 0u);
    ASSERT_TRUE(store->flush().is_ok());
    EXPECT_EQ(window_info(*store, block).row_lo, 2);
    EXPECT_EQ(store->stats().parts, 1u);
    if (write == WritePolicy::through) {
      EXPECT_EQ(dir_.parts().size(), 1u);
      EXPECT_EQ(store->stats().disk_bytes, file_bytes());
      ASSERT_TRUE(store->close().is_ok());
      store = open();
    }
    const auto loaded = store->load(group_key(block.key, kGroup), Part::win);
    testing::expect_rows(loaded, {block}, 2, 8);
  }
}

TEST_F(StorePoints, AFullerPartThatIsNotWrittenLeavesTheNarrowerOne) {
  const Block block = chain(1, 8)[0];
  const auto store = open();
  ASSERT_TRUE(put_rows(*store, block, 5, 8).is_ok());
  ASSERT_TRUE(store->flush().is_ok());
  env_.write_error = ENOSPC;
  ASSERT_TRUE(put_rows(*store, block, 2, 8).is_ok());
  EXPECT_FALSE(store->flush().is_ok());
  const Sequence sequence({block});
  EXPECT_EQ(store->deepest_window(sequence.view(), {6, 0, kGroup}, 8).n, 0);
  EXPECT_EQ(store->deepest_window(sequence.view(), {3, 0, kGroup}, 8).n, 8);
  testing::expect_rows(store->load(group_key(block.key, kGroup), Part::win), {block}, 5, 8);
}

TEST_F(StorePoints, AWindowsTailGoesWithTheBlockThatHasItsRows) {
  const auto store = open();
  const Sequence sequence(chain(1, 8));
  const Block tail = sequence.ending_at(5);
  ASSERT_TRUE(put_rows(*store, tail, 0, 5).is_ok());
  ASSERT_TRUE(put_state(*store, tail).is_ok());
  ASSERT_TRUE(put_rows(*store, sequence.blocks[0], 2, 8).is_ok());
  EXPECT_TRUE(window_info(*store, tail).present);
  EXPECT_EQ(store->deepest_window(sequence.view(), {8, 0, kGroup}, 8).n, 5);
  ASSERT_TRUE(put_rows(*store, sequence.blocks[0], 0, 8).is_ok());
  EXPECT_FALSE(window_info(*store, tail).present);
  EXPECT_EQ(store->deepest_state(sequence.view(), 8).n, 5) << "its state has no other place";
  // And a tail whose rows are there already is not stored.
  std::uint64_t added = 1;
  ASSERT_TRUE(put_rows(*store, sequence.ending_at(3), 0, 3, kGroup, &added).is_ok());
  EXPECT_EQ(added, 0u);
}

// Short chats behind one system prompt: however many end in the block in which it ends, each is found.
TEST_F(StorePoints, AnyNumberOfChildrenIsSeen) {
  const Sequence shared(chain(1, 8));
  const auto one_of_many = [&](std::uint32_t number) {
    auto tokens = shared.blocks[0].tokens;
    tokens.back() = 0x10000 + number;
    return block_under(test_root(), 0, tokens);
  };
  constexpr std::uint32_t kMany = 300;
  auto store = open();
  const Block fork = shared.ending_at(5);
  ASSERT_TRUE(put_state(*store, fork).is_ok());
  ASSERT_TRUE(put_rows(*store, fork, 0, 5).is_ok());
  for (std::uint32_t i = 0; i < kMany; ++i) {
    ASSERT_TRUE(put_block(*store, one_of_many(i)).is_ok());
    ASSERT_TRUE(put_state(*store, one_of_many(i)).is_ok());
    ASSERT_TRUE(put_rows(*store, one_of_many(i), 0, 8).is_ok());
  }
  const auto check = [&] {
    for (const std::uint32_t i : {0u, 1u, kMany / 2, kMany - 1}) {
      const Sequence sequence({one_of_many(i)});
      const auto match = store->longest_child(test_root(), 0, sequence.tokens, {}, Part::kv);
      EXPECT_EQ(match.rows, 8);
      EXPECT_EQ(match.key, sequence.keys[0]);
      EXPECT_EQ(store->deepest_state(sequence.view(), 8).n, 8);
      EXPECT_EQ(store->deepest_state(sequence.view(), 7).n, 5);
      EXPECT_EQ(store->deepest_window(sequence.view(), {8, 0, kGroup}, 8).n, 8);
    }
    const Sequence another({one_of_many(kMany)});
    EXPECT_EQ(store->deepest_fork(another.view(), 8), 7);
    EXPECT_EQ(store->deepest_window(another.view(), {8, 0, kGroup}, 8).n, 7);
  };
  check();
  ASSERT_TRUE(store->close().is_ok());
  store = open();
  // A call reads a bounded number of headers: several calls read all.
  const Sequence first({one_of_many(0)});
  for (int call = 0; call < 8; ++call) {
    store->longest_child(test_root(), 0, first.tokens, {}, Part::kv);
    store->deepest_state(first.view(), 7);
    store->deepest_window(Sequence({one_of_many(kMany)}).view(), {8, 0, kGroup}, 8);
  }
  check();
}

// Rows that several blocks have come from one of them in all parts: runs may differ in their last bits.
TEST_F(StorePoints, OfEqualBlocksTheNewestServesAllParts) {
  const auto store = open();
  const Sequence shared(chain(1, 8));
  std::vector<Block> blocks;
  for (std::uint32_t i = 0; i < 3; ++i) {
    auto tokens = shared.blocks[0].tokens;
    tokens[6] = 0x10000 + i;
    blocks.push_back(block_under(test_root(), 0, tokens));
    ASSERT_TRUE(put_block(*store, blocks.back()).is_ok());
    ASSERT_TRUE(put_rows(*store, blocks.back(), 0, 8).is_ok());
  }
  const auto tokens = std::span(shared.tokens).first(6);
  EXPECT_EQ(store->longest_child(test_root(), 0, tokens, {}, Part::kv).key, blocks.back().key);
  EXPECT_EQ(store->deepest_window(shared.view(), {8, 0, kGroup}, 6).last, blocks.back().key);
}

TEST_F(StorePoints, PartsWithoutSlotsCostNoMemory) {
  options_.ram_bytes = kPage;
  options_.write = WritePolicy::ram_only;
  const auto store = open();
  const Sequence sequence(chain(200, 4));
  put_chain(*store, sequence.blocks, {});
  EXPECT_EQ(store->longest_prefix(sequence.keys, test_root(), 4, Part::kv), 200u);
  EXPECT_EQ(store->stats().ram_bytes, 0u);
  const auto gathered = store->gather(testing::request_for(sequence.blocks));
  EXPECT_TRUE(gathered.status.is_ok());
  EXPECT_TRUE(gathered.slots.empty());
}

TEST_F(StorePoints, FullerRowsOfAnotherStoreStay) {
  const auto first = open();
  const auto second = open();
  const Block block = chain(1, 8)[0];
  ASSERT_TRUE(put_rows(*first, block, 0, 8).is_ok());
  ASSERT_TRUE(first->flush().is_ok());
  std::uint64_t added = 1;
  ASSERT_TRUE(put_rows(*second, block, 5, 8, kGroup, &added).is_ok());
  EXPECT_EQ(added, 0u);
  ASSERT_TRUE(second->flush().is_ok());
  EXPECT_EQ(second->deepest_window(Sequence({block}).view(), {8, 0, kGroup}, 8).n, 8);
  testing::expect_rows(open()->load(group_key(block.key, kGroup), Part::win), {block}, 0, 8);
}

TEST_F(StorePoints, OldWindowsGoBeforeTheChain) {
  options_.write = WritePolicy::ram_only;
  options_.ram_bytes = 12 * kPage;
  const auto store = open();
  const Sequence sequence(chain(8, 4));
  for (const auto& block : sequence.blocks) {
    ASSERT_TRUE(put_block(*store, block, one_page()).is_ok());
    ASSERT_TRUE(testing::put_window(*store, block, block.start(), block.depth, kGroup, one_page()).is_ok());
  }
  // 16 parts, room for 12: the four oldest windows made room, no row of the chain.
  EXPECT_EQ(store->longest_prefix(sequence.keys, test_root(), 4, Part::kv), 8u);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(window_info(*store, sequence.blocks[i]).present, i >= 4) << i;
  EXPECT_EQ(store->deepest_window(sequence.view(), {16, 0, kGroup}, 32).n, 32);
}

TEST_F(StorePoints, TouchingKeepsAPart) {
  options_.write = WritePolicy::ram_only;
  options_.ram_bytes = 3 * kPage;
  const auto store = open();
  const Block a = chain(1, 4, 1)[0], b = chain(1, 4, 2)[0], c = chain(1, 4, 3)[0], d = chain(1, 4, 4)[0];
  put_chain(*store, {a}, one_page());
  put_chain(*store, {b}, one_page());
  put_chain(*store, {c}, one_page());
  store->touch(a.key, Part::kv);
  store->touch(d.key, Part::kv);
  put_chain(*store, {d}, one_page());
  EXPECT_TRUE(has(*store, a));
  EXPECT_FALSE(has(*store, b));
}

TEST_F(StorePoints, WhatAnotherProcessWroteIsFound) {
  const auto first = open();
  const auto second = open();
  const Sequence sequence(chain(4, 4));
  put_chain(*second, sequence.blocks);
  for (const auto& block : sequence.blocks) {
    ASSERT_TRUE(put_rows(*second, block, block.start(), block.depth).is_ok());
  }
  ASSERT_TRUE(put_state(*second, sequence.blocks[3]).is_ok());
  ASSERT_TRUE(second->flush().is_ok());
  EXPECT_EQ(first->longest_prefix(sequence.keys, test_root(), 4, Part::kv), 4u);
  EXPECT_EQ(first->deepest_window(sequence.view(), {10, 0, kGroup}, 16).n, 16);
  EXPECT_EQ(first->deepest_state(sequence.view(), 16).n, 16);
}

TEST_F(StorePoints, DamageIsAShorterReach) {
  const Sequence sequence(chain(4, 4));
  {
    const auto store = open();
    for (const auto& block : sequence.blocks) {
      ASSERT_TRUE(put_rows(*store, block, block.start(), block.depth).is_ok());
    }
    ASSERT_TRUE(store->close().is_ok());
  }
  for (const auto& path : dir_.parts()) {
    if (path.filename().string().starts_with(group_key(sequence.keys[3], kGroup).hex())) fs::resize_file(path, 40);
  }
  const auto store = open();
  EXPECT_EQ(store->deepest_window(sequence.view(), {6, 0, kGroup}, 16).n, 12);
  EXPECT_EQ(store->stats().corrupt_parts, 1u);
  EXPECT_EQ(dir_.parts().size(), 3u);
}

TEST_F(StorePoints, MisuseIsNamed) {
  const auto store = open();
  const Sequence sequence(chain(1, 4));
  ChainView view = sequence.view();
  view.block_size = 0;
  EXPECT_THROW(store->deepest_window(view, {4, 0, kGroup}, 4), std::invalid_argument);
  EXPECT_THROW(store->deepest_state(view, 4), std::invalid_argument);
  EXPECT_THROW(store->deepest_fork(view, 4), std::invalid_argument);
  EXPECT_THROW(store->deepest_window(sequence.view(), {0, 0, kGroup}, 4), std::invalid_argument);
  EXPECT_THROW(store->deepest_window(sequence.view(), {4, 4, kGroup}, 4), std::invalid_argument);
}

}  // namespace
}  // namespace prefixcache
