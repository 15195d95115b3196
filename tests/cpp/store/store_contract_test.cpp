// What every store promises, whatever its tiers.
#include "prefixcache/block_store.h"

#include <random>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>

#include "store/store_impl.h"
#include "support/arrays.h"
#include "support/blocks.h"
#include "support/faulty_env.h"
#include "support/shim_device.h"
#include "support/temp_dir.h"

namespace prefixcache {
namespace {

namespace mx = mlx::core;
using testing::Block;
using testing::block_under;
using testing::chain;
using testing::put_block;
using testing::put_chain;
using testing::request_for;
using testing::test_root;

struct Tiers {
  const char* name;
  std::uint64_t ram_bytes;
  WritePolicy write;
  bool mapped;
  Verify verify;
  bool arena = false;
};

class StoreContract : public ::testing::TestWithParam<Tiers> {
 protected:
  void SetUp() override {
    options_.name_space = "test";
    options_.ram_bytes = GetParam().ram_bytes;
    options_.write = GetParam().write;
    options_.verify = GetParam().verify;
    options_.threads = 3;
    options_.env = &env_;
    options_.disk_wait_seconds = 60;
    if (options_.write != WritePolicy::ram_only) options_.directory = dir_ / "store";
    env_.refuse_to_map = !GetParam().mapped;
    store_ = std::make_unique<store::StoreImpl>(options_, GetParam().arena,
                                                GetParam().arena ? &testing::shim_device() : nullptr);
  }
  // Where the store has no RAM tier, the rows come from files after this.
  void settle() {
    const Status status = store_->flush();
    ASSERT_TRUE(status.is_ok()) << status.message();
  }
  bool has(const Block& block) const { return store_->presence(std::vector<Key>{block.key})[0].has(Part::kv); }

  testing::TempDir dir_;
  testing::FaultyEnv env_;
  Options options_;
  std::unique_ptr<BlockStore> store_;
};

TEST_P(StoreContract, RowsAreThereFromTheMomentPutReturns) {
  const auto blocks = chain(5, 16);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    ASSERT_TRUE(put_block(*store_, blocks[i]).is_ok());
    testing::expect_chain(*store_, {blocks.begin(), blocks.begin() + static_cast<long>(i) + 1});
  }
  settle();
  testing::expect_chain(*store_, blocks);
  testing::expect_chain(*store_, blocks);
}

TEST_P(StoreContract, AnyRowRangeAndCapacity) {
  const auto blocks = chain(4, 8);
  put_chain(*store_, blocks);
  settle();
  std::mt19937 random(6);
  for (int round = 0; round < 60; ++round) {
    const auto lo = static_cast<std::int64_t>(random() % 32);
    const auto hi = lo + static_cast<std::int64_t>(random() % static_cast<unsigned>(33 - lo));
    const auto capacity = hi - lo + static_cast<std::int64_t>(random() % 20);
    const auto first = lo / 8;
    const auto last = std::max(first + 1, (hi + 7) / 8);
    const std::vector<Block> used(blocks.begin() + first, blocks.begin() + last);
    testing::expect_rows(store_->gather(request_for(used, lo, hi, capacity)), used, lo, hi, capacity);
  }
}

// Random ranks, dtypes, axes, strides, part sizes, row ranges and capacities, compared byte for byte.
TEST_P(StoreContract, RoundTripsOfRandomSlots) {
  std::mt19937 random(7);
  for (int round = 0; round < 40; ++round) {
    struct Slot {
      std::string name;
      mx::Dtype dtype;
      mx::Shape shape;
      int axis;
      std::vector<mx::array> pieces;
    };
    std::vector<Slot> slots;
    for (std::size_t i = 0; i < 1 + random() % 4; ++i) {
      Slot slot{std::to_string(i),
                testing::all_dtypes()[random() % testing::all_dtypes().size()],
                testing::random_shape(random, 1 + random() % 5),
                kNoSeqAxis,
                {}};
      if (random() % 4 != 0) slot.axis = static_cast<int>(random() % slot.shape.size());
      slots.push_back(std::move(slot));
    }
    std::vector<Block> blocks;
    for (std::size_t b = 0; b < 1 + random() % 4; ++b) {
      std::vector<std::uint32_t> tokens(1 + random() % 9);
      for (auto& token : tokens) token = static_cast<std::uint32_t>(random());
      blocks.push_back(b == 0 ? block_under(test_root(), 0, tokens) : block_under(blocks.back(), tokens));
      const Block& block = blocks.back();
      std::vector<SlotInput> inputs;
      for (auto& slot : slots) {
        // The array has rows around those of the block.
        const auto before = std::min<std::int64_t>(block.start(), random() % 3);
        const auto first = block.start() - before;
        auto shape = slot.shape;
        const auto rows = static_cast<int>(block.depth - first + random() % 3);
        if (slot.axis >= 0) shape[static_cast<std::size_t>(slot.axis)] = rows;
        const auto array = testing::strided_array(random, shape, slot.dtype);
        inputs.push_back({slot.name, array, slot.axis, first});
        if (slot.axis >= 0)
          slot.pieces.push_back(testing::rows_of(array, slot.axis, before, block.depth - first));
        else
          slot.pieces = {array};
      }
      PutRequest request;
      request.key = block.key;
      request.parent = block.parent;
      request.depth = block.depth;
      request.row_lo = block.start();
      request.row_hi = block.depth;
      request.tokens = block.tokens;
      request.slots = inputs;
      ASSERT_TRUE(store_->put(request).is_ok());
    }
    if (round % 2 == 0) settle();
    const std::int64_t depth = blocks.back().depth;
    const auto lo = static_cast<std::int64_t>(random()) % (blocks[0].depth + 1);
    const auto hi = blocks.size() == 1 ? lo + static_cast<std::int64_t>(random()) % (depth - lo + 1) : depth;
    const auto spare = static_cast<std::int64_t>(random() % 5);
    const Gathered gathered = store_->gather(request_for(blocks, lo, hi, hi - lo + spare));
    ASSERT_TRUE(gathered.status.is_ok()) << gathered.status.message();
    ASSERT_EQ(gathered.slots.size(), slots.size());
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const auto& got = gathered.slots[i].array;
      EXPECT_TRUE(got.is_donatable());
      EXPECT_EQ(gathered.slots[i].name, slots[i].name);
      if (slots[i].axis < 0) {
        EXPECT_EQ(testing::bytes_of(got), testing::bytes_of(slots[i].pieces.back()));
        continue;
      }
      const int axis = slots[i].axis;
      const auto wanted = testing::rows_of(mx::concatenate(slots[i].pieces, axis), axis, lo, hi);
      EXPECT_EQ(testing::bytes_of(testing::rows_of(got, axis, 0, hi - lo)), testing::bytes_of(wanted));
      const auto rest = testing::bytes_of(testing::rows_of(got, axis, hi - lo, hi - lo + spare));
      EXPECT_EQ(rest, std::vector<std::uint8_t>(rest.size(), 0));
    }
    if (HasFailure()) FAIL() << "round " << round;
  }
}

TEST_P(StoreContract, LazyArraysAreEvaluated) {
  const auto block = chain(1, 4)[0];
  const mx::array lazy = mx::add(mx::zeros({2, 4}), mx::array(3.0f));
  const std::vector<SlotInput> slots = {{"x", lazy, 1}};
  PutRequest request;
  request.key = block.key;
  request.parent = block.parent;
  request.depth = request.row_hi = 4;
  request.tokens = block.tokens;
  request.slots = slots;
  std::uint64_t added = 0;
  ASSERT_TRUE(store_->put(request, &added).is_ok());
  EXPECT_EQ(added, 32u);
  settle();
  const auto gathered = store_->load(block.key, Part::kv);
  ASSERT_TRUE(gathered.status.is_ok());
  EXPECT_TRUE(mx::array_equal(gathered.slots[0].array, lazy).item<bool>());
}

TEST_P(StoreContract, WholeArraysAndMetaComeFromTheLastBlock) {
  const std::vector<testing::SlotSpec> specs = {{"state", mx::float32, {3, 2}, kNoSeqAxis},
                                                {"scalar", mx::int64, {}, kNoSeqAxis},
                                                {"none", mx::float16, {0, 4}, kNoSeqAxis},
                                                {"keys", mx::bfloat16, {1, 0, 4}, 1}};
  const auto blocks = chain(3, 4);
  for (std::size_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(put_block(*store_, blocks[i], specs, "meta \" " + std::to_string(i)).is_ok());
  }
  settle();
  auto gathered = store_->gather(request_for(blocks, 0, 12, 20));
  EXPECT_EQ(gathered.meta, "meta \" 2");
  testing::expect_rows(gathered, blocks, 0, 12, 20, specs);
  gathered = store_->load(blocks[1].key, Part::kv);
  EXPECT_EQ(gathered.meta, "meta \" 1");
  testing::expect_rows(gathered, {blocks[1]}, 4, 8, 4, specs);

  auto request = request_for(blocks);
  request.slots = {"keys", "scalar"};
  gathered = store_->gather(request);
  testing::expect_rows(gathered, blocks, 0, 12, 12, {specs[3], specs[1]});
}

TEST_P(StoreContract, NoNameOfASlotLooksLikeSeveralSlots) {
  using namespace std::string_literals;
  const auto slots = [](std::initializer_list<std::string> names) {
    std::vector<testing::SlotSpec> specs;
    for (const auto& name : names) specs.push_back({name, mx::uint8, {0, 1}, 0});
    return specs;
  };
  std::vector<std::vector<testing::SlotSpec>> forms = {slots({"x", "y"}), slots({"x", "z"}), slots({"x"}),
                                                       slots({"x", "y", "z"})};
  for (int dtype = 0; dtype < 14; ++dtype) {
    const std::string number = std::to_string(dtype);
    for (const auto& end : {"\0"s + number + "*4,1;", "\0"s + number + ",4,1;", number + "*4,1;1:", ""s}) {
      forms.push_back(slots({"x" + end + "y"}));
    }
  }
  for (std::size_t i = 0; i < 4; ++i) {
    for (std::size_t j = 0; j < forms.size(); ++j) {
      if (i == j) continue;
      const auto blocks = chain(2, 4, static_cast<std::uint32_t>(100 * i + j));
      ASSERT_TRUE(put_block(*store_, blocks[0], forms[i]).is_ok());
      ASSERT_TRUE(put_block(*store_, blocks[1], forms[j]).is_ok());
      const auto gathered = store_->gather(request_for(blocks));
      EXPECT_EQ(gathered.status.code(), StatusCode::Corrupt) << i << " and " << forms[j].front().name;
      EXPECT_EQ(gathered.good, 1u);
    }
  }
}

TEST_P(StoreContract, PartsOfABlockAreApart) {
  const auto block = chain(1, 4)[0];
  const std::vector<testing::SlotSpec> kv = {{"keys", mx::float16, {0, 4}, 0}};
  const std::vector<testing::SlotSpec> state = {{"s", mx::float32, {5}, kNoSeqAxis}};
  ASSERT_TRUE(put_block(*store_, block, kv).is_ok());
  ASSERT_TRUE(put_block(*store_, block, state, "", nullptr, Part::state).is_ok());
  settle();
  auto presence = store_->presence(std::vector<Key>{block.key, test_root()});
  EXPECT_TRUE(presence[0].has(Part::kv) && presence[0].has(Part::state));
  EXPECT_FALSE(presence[0].has(Part::win) || presence[1].has(Part::kv));
  EXPECT_EQ(presence[0].parts[0].row_lo, 0);
  EXPECT_EQ(presence[0].parts[0].row_hi, 4);
  testing::expect_rows(store_->load(block.key, Part::state), {block}, 0, 4, -1, state);
  const std::vector<Part> only_kv = {Part::kv};
  ASSERT_TRUE(store_->erase(std::vector<Key>{block.key}, only_kv).is_ok());
  presence = store_->presence(std::vector<Key>{block.key});
  EXPECT_FALSE(presence[0].has(Part::kv));
  EXPECT_TRUE(presence[0].has(Part::state));
}

TEST_P(StoreContract, WhatIsThereIsNotCopiedAgain) {
  const auto block = chain(1, 4)[0];
  std::uint64_t added = 0;
  ASSERT_TRUE(put_block(*store_, block, testing::two_slots(), "", &added).is_ok());
  EXPECT_EQ(added, 4u * (2 * 8 * 2 + 3 * 5));
  settle();
  ASSERT_TRUE(put_block(*store_, block, testing::two_slots(), "", &added).is_ok());
  EXPECT_EQ(added, 0u);
  const auto stats = store_->stats();
  EXPECT_EQ(stats.parts, 1u);
  EXPECT_EQ(stats.put_parts, 1u);
  EXPECT_EQ(stats.put_existing, 1u);
  EXPECT_LE(stats.written_parts, 1u);
}

TEST_P(StoreContract, AMissTellsHowMuchIsGood) {
  const auto blocks = chain(4, 4);
  put_chain(*store_, {blocks[0], blocks[1], blocks[3]});
  settle();
  const auto gathered = store_->gather(request_for(blocks));
  EXPECT_EQ(gathered.status.code(), StatusCode::NotFound);
  EXPECT_EQ(gathered.good, 2u);
  EXPECT_TRUE(gathered.slots.empty());
  EXPECT_EQ(store_->load(blocks[2].key, Part::kv).status.code(), StatusCode::NotFound);
  EXPECT_EQ(store_->longest_prefix(keys_of(blocks), test_root(), 4, Part::kv), 2u);
  EXPECT_EQ(store_->longest_prefix(keys_of(blocks), test_root(), 4, Part::win), 0u);
  testing::expect_chain(*store_, {blocks[0], blocks[1]});
  EXPECT_EQ(store_->stats().corrupt_parts, 0u);
}

TEST_P(StoreContract, EraseAndClearForget) {
  const auto a = chain(3, 4, 1), b = chain(2, 4, 2);
  put_chain(*store_, a);
  settle();
  put_chain(*store_, b);  // may still wait to be written
  const std::vector<Part> kv = {Part::kv};
  const std::vector<Key> keys = {a[2].key, b[1].key, test_root()};
  ASSERT_TRUE(store_->erase(keys, kv).is_ok());
  EXPECT_FALSE(has(a[2]) || has(b[1]));
  EXPECT_TRUE(has(a[1]) && has(b[0]));
  EXPECT_EQ(store_->gather(request_for(a)).good, 2u);
  settle();
  if (!options_.directory.empty()) {
    EXPECT_EQ(dir_.parts().size(), 3u);
  }
  ASSERT_TRUE(store_->clear().is_ok());
  settle();
  EXPECT_EQ(store_->stats().parts, 0u);
  EXPECT_TRUE(dir_.files().empty());
  EXPECT_EQ(store_->stats().disk_bytes, 0u);
  put_chain(*store_, a);
  settle();
  testing::expect_chain(*store_, a);
}

TEST_P(StoreContract, AnErasedBlockThatWaitedLeavesNoFile) {
  if (options_.directory.empty()) GTEST_SKIP() << "no files";
  const auto blocks = chain(4, 4);
  const std::vector<Part> kv = {Part::kv};
  env_.hold_writes();
  put_chain(*store_, blocks);
  std::thread release([&] {
    env_.wait_for_write();  // the first one is being written, the others wait
    EXPECT_TRUE(store_->erase(keys_of(blocks), kv).is_ok());
    env_.release_writes();
  });
  settle();
  release.join();
  settle();
  EXPECT_TRUE(dir_.parts().empty());
  EXPECT_EQ(store_->stats().disk_bytes, 0u);
  EXPECT_EQ(store_->stats().parts, 0u);
}

TEST_P(StoreContract, ABlockErasedAndPutAgainWhileItWasWrittenIsCountedOnce) {
  if (options_.directory.empty()) GTEST_SKIP() << "no files";
  const auto block = chain(1, 4)[0];
  const std::vector<Part> kv = {Part::kv};
  for (const bool erased_at_last : {false, true}) {
    env_.hold_writes();
    ASSERT_TRUE(put_block(*store_, block).is_ok());
    std::thread other([&] {
      env_.wait_for_write();
      EXPECT_TRUE(store_->erase(std::vector<Key>{block.key}, kv).is_ok());
      EXPECT_TRUE(put_block(*store_, block).is_ok());
      if (erased_at_last) {
        EXPECT_TRUE(store_->erase(std::vector<Key>{block.key}, kv).is_ok());
      }
      env_.release_writes();
    });
    settle();
    other.join();
    settle();
    EXPECT_EQ(store_->stats().disk_bytes, dir_.bytes()) << erased_at_last;
    EXPECT_EQ(dir_.parts().size(), erased_at_last ? 0u : 1u);
    if (!erased_at_last) testing::expect_chain(*store_, {block});
    ASSERT_TRUE(store_->clear().is_ok());
  }
}

TEST_P(StoreContract, ChildrenNewestFirstWithTheirText) {
  const auto parent = chain(1, 4)[0];
  const auto a = block_under(parent, {1, 2, 3, 4}), b = block_under(parent, {1, 2, 9, 9});
  const auto c = block_under(parent, {7, 7});
  put_chain(*store_, {parent, a, b, c});
  settle();
  const auto children = store_->children(parent.key);
  ASSERT_EQ(children.size(), 3u);
  EXPECT_EQ(children[0].key, c.key);
  EXPECT_EQ(children[0].tokens, (std::vector<std::uint32_t>{7, 7}));
  EXPECT_EQ(children[0].depth, 6);
  EXPECT_EQ(children[2].key, a.key);
  EXPECT_TRUE(store_->children(a.key).empty());
  ASSERT_EQ(store_->children(test_root()).size(), 1u);

  const auto match = [&](std::vector<std::uint32_t> tokens) {
    return store_->longest_child(parent.key, 4, tokens, {}, Part::kv);
  };
  EXPECT_EQ(match({1, 2, 3, 5}).key, a.key);
  EXPECT_EQ(match({1, 2, 3, 5}).rows, 3);
  EXPECT_EQ(match({1, 2, 9}).key, b.key);
  EXPECT_EQ(match({1, 2, 9}).rows, 3);
  EXPECT_EQ(match({7, 7, 7, 7, 7}).key, c.key);
  EXPECT_EQ(match({7, 7, 7, 7, 7}).rows, 2);
  EXPECT_EQ(match({7, 7, 7, 7, 7}).block_rows, 2);
  EXPECT_EQ(match({5}).rows, 0);
  EXPECT_GT(match({5}).block_rows, 0) << "there is a child, but it shares nothing";
  EXPECT_EQ(store_->longest_child(a.key, 8, std::vector<std::uint32_t>{1}, {}, Part::kv).block_rows, 0);
  EXPECT_EQ(store_->longest_child(parent.key, 4, std::vector<std::uint32_t>{1}, {}, Part::state).block_rows, 0);
}

TEST_P(StoreContract, ContentKeysEndTheCommonRun) {
  const Key cat = namespace_id("cat"), dog = namespace_id("dog");
  const std::vector<std::uint32_t> tokens = {5, 5, 5, 5, 5, 5};
  const auto with_cat = block_under(test_root(), 0, tokens, {{2, 4, cat}});
  ASSERT_TRUE(put_block(*store_, with_cat).is_ok());
  settle();
  const auto rows = [&](std::vector<ContentKey> content) {
    return store_->longest_child(test_root(), 0, tokens, content, Part::kv).rows;
  };
  EXPECT_EQ(rows({{2, 4, cat}}), 6);
  EXPECT_EQ(rows({{2, 4, dog}}), 2);
  EXPECT_EQ(rows({}), 2);
  EXPECT_EQ(rows({{2, 4, cat}, {5, 6, dog}}), 5);
  EXPECT_EQ(rows({{1, 2, dog}, {2, 4, cat}}), 1);
  EXPECT_EQ(rows({{2, 4, cat}, {6, 9, dog}}), 6);
  EXPECT_EQ(store_->children(test_root())[0].content, with_cat.content);
}

TEST_P(StoreContract, ALongerBlockTakesTheTailsPlace) {
  const auto head = chain(1, 4)[0];
  const auto tail = block_under(head, {1, 2}), other = block_under(head, {1, 3});
  const auto whole = block_under(head, {1, 2, 3, 4});
  const auto tail_of_cat = block_under(head.key, 4, {1, 2}, {{5, 6, namespace_id("cat")}});
  put_chain(*store_, {head, tail, other, tail_of_cat});
  settle();
  ASSERT_TRUE(put_block(*store_, whole).is_ok());
  settle();
  EXPECT_FALSE(has(tail));
  EXPECT_TRUE(has(other) && has(whole) && has(tail_of_cat));
  testing::expect_rows(store_->gather(request_for({head, whole}, 0, 6)), {head, whole}, 0, 6);
  // And a tail that a longer block contains is not stored.
  std::uint64_t added = 1;
  ASSERT_TRUE(put_block(*store_, tail, testing::two_slots(), "", &added).is_ok());
  EXPECT_EQ(added, 0u);
  EXPECT_FALSE(has(tail));
  settle();
  if (!options_.directory.empty()) {
    EXPECT_EQ(dir_.parts().size(), 4u);
  }
}

TEST_P(StoreContract, MisuseIsNamed) {
  const auto block = chain(1, 4)[0];
  const auto array = testing::array_of(testing::two_slots()[0], {block}, 0, 4);
  const auto refused = [&](const std::string& what, auto change) {
    std::vector<SlotInput> slots = {{"keys", array, 2}};
    PutRequest request;
    request.key = block.key;
    request.depth = request.row_hi = 4;
    request.tokens = block.tokens;
    change(request, slots);
    request.slots = slots;
    try {
      store_->put(request);
      ADD_FAILURE() << what << ": nothing was thrown";
    } catch (const std::invalid_argument& error) {
      EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
    }
  };
  using Slots = std::vector<SlotInput>;
  refused("occurs twice", [](auto&, Slots& s) { s.push_back(s[0]); });
  refused("only a part 'kv' may be without slots", [](PutRequest& r, Slots& s) { s.clear(), r.part = Part::win; });
  refused("only a part 'kv' may be without slots", [](PutRequest& r, Slots& s) { s.clear(), r.part = Part::state; });
  refused("seq_axis 4", [](auto&, Slots& s) { s[0].seq_axis = 4; });
  refused("seq_axis -2", [](auto&, Slots& s) { s[0].seq_axis = -2; });
  refused("rows 1..5", [](auto&, Slots& s) { s[0].first_row = 1; });
  refused("rows -1..4", [](PutRequest& r, auto&) { r.row_lo = -1; });
  refused("rows -9..-5, asked for 0..4", [](auto&, Slots& s) { s[0].first_row = -9; });
  refused("dtype", [](auto&, Slots& s) { s[0].array = mx::zeros({1, 2, 4, 8}, mx::complex64); });
  refused("rows 0..5", [](PutRequest& r, Slots&) { r.row_hi = 5; });
  refused("rows 3..2", [](PutRequest& r, Slots&) { r.row_lo = 3, r.row_hi = 2; });
  refused("0 tokens", [](PutRequest& r, Slots&) { r.tokens = {}; });
  refused("depth 3", [](PutRequest& r, Slots&) { r.depth = r.row_hi = 3; });
  EXPECT_EQ(store_->stats().parts, 0u);

  const auto not_gathered = [&](auto change) {
    auto request = request_for({block});
    change(request);
    EXPECT_THROW(store_->gather(request), std::invalid_argument);
  };
  not_gathered([](auto& r) { r.keys.clear(); });
  not_gathered([](auto& r) { r.row_lo = -1; });
  not_gathered([](auto& r) { r.row_hi = -1; });
  not_gathered([](auto& r) { r.capacity = 3; });
  not_gathered([](auto& r) { r.capacity = std::int64_t{1} << 31; });
  EXPECT_THROW(store_->longest_prefix({}, test_root(), 0, Part::kv), std::invalid_argument);
}

TEST_P(StoreContract, AClosedStoreAnswersClosedOrAMiss) {
  const auto blocks = chain(2, 4);
  put_chain(*store_, blocks);
  ASSERT_TRUE(store_->close().is_ok());
  ASSERT_TRUE(store_->close().is_ok());
  if (!options_.directory.empty()) {
    EXPECT_EQ(dir_.parts().size(), 2u);
  }
  const std::vector<Part> kv = {Part::kv};
  EXPECT_EQ(put_block(*store_, blocks[0]).code(), StatusCode::Closed);
  EXPECT_EQ(store_->gather(request_for(blocks)).status.code(), StatusCode::Closed);
  EXPECT_EQ(store_->load(blocks[0].key, Part::kv).status.code(), StatusCode::Closed);
  EXPECT_EQ(store_->erase(keys_of(blocks), kv).code(), StatusCode::Closed);
  EXPECT_EQ(store_->clear().code(), StatusCode::Closed);
  EXPECT_EQ(store_->flush().code(), StatusCode::Closed);
  EXPECT_FALSE(has(blocks[0]));
  EXPECT_EQ(store_->longest_prefix(keys_of(blocks), test_root(), 4, Part::kv), 0u);
  EXPECT_TRUE(store_->children(test_root()).empty());
  EXPECT_EQ(store_->longest_child(test_root(), 0, blocks[0].tokens, {}, Part::kv).rows, 0);
  EXPECT_EQ(store_->stats().parts, 0u);
}

TEST_P(StoreContract, EmptyRowRangesAndEmptyExtents) {
  const auto block = chain(1, 4)[0];
  const std::vector<testing::SlotSpec> specs = {{"none", mx::float16, {0, 0, 4}, 1},
                                                {"keys", mx::float16, {2, 0, 4}, 1}};
  ASSERT_TRUE(put_block(*store_, block, specs).is_ok());
  settle();
  testing::expect_rows(store_->gather(request_for({block}, 0, 4, 9)), {block}, 0, 4, 9, specs);
  testing::expect_rows(store_->gather(request_for({block}, 2, 2, 0)), {block}, 2, 2, 0, specs);
  const auto zeros = store_->gather(request_for({block}, 4, 4, 3));
  ASSERT_TRUE(zeros.status.is_ok());
  EXPECT_EQ(testing::contiguous_bytes(zeros.slots[1].array), std::vector<std::uint8_t>(2 * 3 * 4 * 2, 0));
}

// The short form of the soak: every row that comes back is the row of its block.
TEST_P(StoreContract, EightThreadsGetOnlyWhatBelongsToTheirKeys) {
  std::vector<std::vector<Block>> chains;
  for (std::uint32_t c = 0; c < 6; ++c) chains.push_back(chain(4, 16, c));
  std::atomic<int> hits{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      const std::vector<Part> kv = {Part::kv};
      for (int i = 0; i < 60; ++i) {
        const auto& blocks = chains[random() % chains.size()];
        const auto kind = random() % 16;
        if (kind < 7) {
          for (const auto& block : blocks) EXPECT_TRUE(put_block(*store_, block).is_ok());
        } else if (kind < 13) {
          const auto found = store_->longest_prefix(keys_of(blocks), test_root(), 16, Part::kv);
          if (found == 0) continue;
          const std::vector<Block> prefix(blocks.begin(), blocks.begin() + static_cast<long>(found));
          const auto gathered = store_->gather(request_for(prefix));
          if (!gathered.status.is_ok()) {
            EXPECT_LT(gathered.good, found);
            continue;
          }
          testing::expect_rows(gathered, prefix, 0, prefix.back().depth);
          ++hits;
        } else if (kind < 14) {
          EXPECT_TRUE(store_->erase(std::vector<Key>{blocks[random() % 4].key}, kv).is_ok());
        } else if (kind < 15) {
          EXPECT_TRUE(store_->flush().is_ok());
        } else {
          store_->children(test_root());
          store_->stats();
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_GT(hits, 0);
  settle();
  const auto stats = store_->stats();
  EXPECT_EQ(stats.corrupt_parts, 0u);
  EXPECT_EQ(stats.queued_bytes, 0u);
  EXPECT_LE(stats.ram_peak_bytes, options_.ram_bytes);
  EXPECT_EQ(stats.disk_bytes, dir_.bytes());
  if (!options_.directory.empty()) {
    EXPECT_EQ(dir_.parts().size(), stats.parts);
  }
}

constexpr std::uint64_t kRam = 64 << 20;
INSTANTIATE_TEST_SUITE_P(Tiers, StoreContract,
                         ::testing::Values(Tiers{"ram_and_disk", kRam, WritePolicy::through, true, Verify::first},
                                           Tiers{"disk", 0, WritePolicy::through, true, Verify::first},
                                           Tiers{"disk_always_verified", 0, WritePolicy::through, true, Verify::always},
                                           Tiers{"disk_unmapped", 0, WritePolicy::through, false, Verify::first},
                                           Tiers{"ram", kRam, WritePolicy::ram_only, true, Verify::first},
                                           Tiers{"arena_and_disk", kRam, WritePolicy::through, true, Verify::first,
                                                 true},
                                           Tiers{"arena", kRam, WritePolicy::ram_only, true, Verify::first, true}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace prefixcache
