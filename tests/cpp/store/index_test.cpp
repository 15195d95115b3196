#include "store/index.h"

#include <algorithm>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "layout/block_file.h"
#include "support/blocks.h"

namespace prefixcache::store {
namespace {

using testing::Block;
using testing::chain;

PartRecord& add(Index& index, const Block& block, Part part = Part::kv) {
  Entry& entry = index.entry(block.key, layout::parent_prefix(block.parent), block.depth);
  index.set_parent(entry, block.parent);
  return index.part(entry, part);
}

std::vector<Key> order_of(const std::list<PartRecord*>& order) {
  std::vector<Key> keys;
  for (const auto* record : order) keys.push_back(record->entry->key);
  return keys;
}

TEST(Index, FindsWhatWasAddedAndForgetsWhatWasRemoved) {
  Index index;
  const auto blocks = chain(2, 4);
  EXPECT_EQ(index.find(blocks[0].key), nullptr);
  PartRecord& kv = add(index, blocks[0]);
  PartRecord& state = add(index, blocks[0], Part::state);
  EXPECT_EQ(index.find(blocks[0].key, Part::kv), &kv);
  EXPECT_EQ(index.find(blocks[0].key, Part::win), nullptr);
  EXPECT_EQ(&add(index, blocks[0]), &kv);
  EXPECT_EQ(index.part_count(), 2u);
  EXPECT_EQ(index.all().size(), 2u);

  index.remove(kv);
  EXPECT_EQ(index.find(blocks[0].key, Part::kv), nullptr);
  EXPECT_EQ(index.find(blocks[0].key, Part::state), &state);
  index.remove(state);
  EXPECT_EQ(index.find(blocks[0].key), nullptr);
  EXPECT_EQ(index.part_count(), 0u);
}

TEST(Index, ListsChildrenOldestFirst) {
  Index index;
  const auto a = chain(1, 4, 1), b = chain(1, 4, 2), c = chain(1, 4, 3);
  for (const auto* block : {&a[0], &b[0], &c[0]}) add(index, *block);
  const auto prefix = layout::parent_prefix(testing::test_root());
  ASSERT_EQ(index.children(prefix).size(), 3u);
  EXPECT_EQ(index.children(prefix)[0]->key, a[0].key);
  EXPECT_EQ(index.children(prefix)[2]->key, c[0].key);
  index.remove(*index.find(b[0].key, Part::kv));
  EXPECT_EQ(index.children(prefix).size(), 2u);
  EXPECT_TRUE(index.children(layout::parent_prefix(a[0].key)).empty());
}

TEST(Index, AChainLiesInOneRunDeepestLast) {
  Index index;
  const auto a = chain(3, 4, 1), b = chain(2, 4, 2);
  for (const auto& block : a) index.add_to_disk(add(index, block));
  for (const auto& block : b) index.add_to_disk(add(index, block));
  EXPECT_EQ(order_of(index.disk_order()), (std::vector<Key>{b[0].key, b[1].key, a[0].key, a[1].key, a[2].key}));
  index.touch(*index.find(a[1].key, Part::kv));
  EXPECT_EQ(order_of(index.disk_order()), (std::vector<Key>{a[0].key, a[1].key, b[0].key, b[1].key, a[2].key}));
  EXPECT_TRUE(index.ram_order().empty());
}

TEST(Index, ABlockThatComesAfterItsChildGoesInFrontOfIt) {
  Index index;
  const auto a = chain(3, 4);
  for (const auto* block : {&a[0], &a[2], &a[1]}) {
    index.add_to_ram(add(index, *block));
    index.add_to_disk(*index.find(block->key, Part::kv));
  }
  EXPECT_EQ(order_of(index.ram_order()), keys_of(a));
  EXPECT_EQ(order_of(index.disk_order()), keys_of(a));
}

TEST(Index, TiersAreApart) {
  Index index;
  const auto a = chain(2, 4);
  PartRecord& first = add(index, a[0]);
  PartRecord& second = add(index, a[1]);
  index.add_to_ram(first);
  index.add_to_ram(first);
  index.add_to_disk(second);
  EXPECT_EQ(index.ram_count(), 1u);
  EXPECT_EQ(index.disk_order().size(), 1u);
  index.remove_from_ram(first);
  index.remove_from_ram(first);
  EXPECT_EQ(index.ram_count(), 0u);
  index.remove(second);
  EXPECT_TRUE(index.disk_order().empty());
}

// Whatever is added, touched and removed from the back: nothing is newer than its parent.
TEST(Index, RandomTreesKeepParentsInFront) {
  std::mt19937 random(4);
  for (int round = 0; round < 30; ++round) {
    Index index;
    std::vector<Block> known;
    std::set<Key> in;
    for (int step = 0; step < 150; ++step) {
      const auto kind = random() % 4;
      if (kind < 2) {
        const Block* parent = known.empty() || random() % 5 == 0 ? nullptr : &known[random() % known.size()];
        if (parent != nullptr && !in.contains(parent->key)) continue;
        const auto made = parent == nullptr
                              ? chain(1, 2, static_cast<std::uint32_t>(random()))
                              : chain(1, 2, static_cast<std::uint32_t>(random()), parent->key, parent->depth);
        known.push_back(made[0]);
        in.insert(made[0].key);
        index.add_to_ram(add(index, made[0]));
      } else if (kind == 2 && !in.empty()) {
        index.touch(*index.find(*std::next(in.begin(), static_cast<long>(random() % in.size())), Part::kv));
      } else if (!in.empty()) {
        PartRecord& last = *index.ram_order().back();
        EXPECT_TRUE(index.children(layout::parent_prefix(last.entry->key)).empty()) << "a parent went before its child";
        in.erase(last.entry->key);
        index.remove(last);
      }
      std::set<Key> seen;
      for (const auto* record : index.ram_order()) {
        const bool has_parent = in.contains(record->entry->parent);
        ASSERT_TRUE(!has_parent || seen.contains(record->entry->parent));
        seen.insert(record->entry->key);
      }
    }
  }
}

TEST(Index, ChildrenAreFoundByTheirFirstToken) {
  Index index;
  const std::uint64_t parent = 7;
  using Entries = std::deque<Entry*>;
  Entries entries;
  for (std::uint32_t i = 0; i < 6; ++i) {
    Key key{};
    key.bytes[0] = static_cast<std::uint8_t>(i);
    Entry& entry = index.entry(key, parent, 4);
    index.part(entry, Part::kv);
    entries.push_back(&entry);
    EXPECT_EQ(index.unread_children(parent).size(), i + 1);
  }
  for (std::uint32_t i = 0; i < 5; ++i) {
    index.set_parent(*entries[i], Key{});
    index.set_text(*entries[i], {{10 + i % 2, i}, {}});
    index.set_text(*entries[i], {{99}, {}});
  }
  const auto family = [&](std::uint32_t token) { return index.children(parent, token); };
  EXPECT_EQ(family(10), (Entries{entries[0], entries[2], entries[4]}));
  EXPECT_EQ(family(11), (Entries{entries[1], entries[3]}));
  EXPECT_TRUE(family(99).empty());
  EXPECT_TRUE(index.children(8, 10).empty());
  EXPECT_EQ(index.unread_children(parent), Entries{entries[5]});
  EXPECT_EQ(index.children(parent), entries);
  for (const int gone : {2, 1, 3}) index.remove(*entries[gone]->parts[0]);
  EXPECT_EQ(family(10), (Entries{entries[0], entries[4]}));
  EXPECT_TRUE(family(11).empty());
  EXPECT_EQ(index.children(parent).size(), 3u);
  for (const int gone : {0, 4, 5}) index.remove(*entries[gone]->parts[0]);
  EXPECT_TRUE(index.children(parent).empty());
  EXPECT_TRUE(index.unread_children(parent).empty());
}

TEST(Index, ChildrenStayInTheirOrderHoweverTheyAreFoundAndRead) {
  Index index;
  std::deque<Entry*> wanted;
  for (std::uint8_t i = 0; i < 8; ++i) {
    Key key{};
    key.bytes[0] = i;
    // Newest first, as a directory is taken in; then newer ones.
    const bool is_old = i < 4;
    Entry& entry = index.entry(key, 7, 4, is_old);
    index.part(entry, Part::kv);
    is_old ? wanted.push_front(&entry) : wanted.push_back(&entry);
  }
  EXPECT_EQ(index.children(7), wanted);
  EXPECT_EQ(index.unread_children(7), wanted);
  for (const int i : {5, 0, 7, 2, 3, 1, 6, 4}) index.set_text(*wanted[static_cast<std::size_t>(i)], {{1}, {}});
  EXPECT_EQ(index.children(7, 1), wanted);
}

TEST(Index, ShardsHoldEachRecordOnceAndAboutAsMany) {
  Index index;
  std::multiset<Key> wanted;
  for (const auto& block : chain(4096, 1)) {
    add(index, block);
    wanted.insert(block.key);
    if (block.depth % 2 == 0) {
      add(index, block, Part::state);
      wanted.insert(block.key);
    }
  }
  std::multiset<Key> seen;
  std::size_t largest = 0;
  for (std::size_t shard = 0; shard < Index::kShards; ++shard) {
    const std::size_t before = seen.size();
    index.for_each(shard, [&](PartRecord& record) { seen.insert(record.entry->key); });
    largest = std::max(largest, seen.size() - before);
  }
  EXPECT_EQ(seen, wanted);
  EXPECT_LT(largest, 4 * wanted.size() / Index::kShards);
}

}  // namespace
}  // namespace prefixcache::store
