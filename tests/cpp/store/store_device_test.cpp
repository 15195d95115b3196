// A store whose rows in RAM are gathered by a device: the kernel's source run as C++ (support/shim_device.h).
#include <atomic>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mlx/primitives.h>

#include "store/store_impl.h"
#include "support/shim_device.h"
#include "support/store_fixture.h"

namespace prefixcache::store {
namespace {

namespace mx = mlx::core;
using testing::Block;
using testing::chain;
using testing::expect_rows;
using testing::put_block;
using testing::put_chain;
using testing::request_for;
using testing::SlotSpec;

// Forms of several widths: halves, a quantised layer's three arrays, bytes of an odd number, and a slot without rows.
std::vector<SlotSpec> many_forms() {
  return {{"0/keys", mx::float16, {1, 2, 0, 8}, 2},
          {"0/values", mx::float16, {1, 2, 0, 8}, 2},
          {"1/keys", mx::uint32, {1, 2, 0, 4}, 2},
          {"1/keys.scales", mx::bfloat16, {1, 2, 0, 1}, 2},
          {"1/keys.biases", mx::bfloat16, {1, 2, 0, 1}, 2},
          {"2/codes", mx::uint8, {1, 3, 0, 5}, 2},
          {"3/flat", mx::float32, {0, 4}, 0},
          {"4/state", mx::float32, {3}, kNoSeqAxis}};
}

std::vector<SlotSpec> with_rows(std::vector<SlotSpec> specs) {
  std::erase_if(specs, [](const auto& spec) { return spec.seq_axis == kNoSeqAxis; });
  return specs;
}

// Does as another device does, and counts; or fails.
class Watched : public gather::DeviceGather {
 public:
  enum class Fails { never, when_started, without_memory, when_evaluated };
  explicit Watched(Fails fails = Fails::never) : fails_(fails) {}

  const std::string& name() const override { return testing::shim_device().name(); }
  std::vector<mx::array> start(const gather::KernelRequest& request, std::span<const mx::array> slabs,
                               std::span<const mx::Shape> shapes) const override;
  int started() const { return started_; }

 private:
  const Fails fails_;
  mutable std::atomic<int> started_{0};
};

// What a device that breaks off leaves.
class Broken : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;
  void eval_cpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("the device is out of memory");
  }
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    eval_cpu(inputs, outputs);
  }
  const char* name() const override { return "Broken"; }
};

std::vector<mx::array> Watched::start(const gather::KernelRequest& request, std::span<const mx::array> slabs,
                                      std::span<const mx::Shape> shapes) const {
  ++started_;
  if (fails_ == Fails::when_started) throw std::runtime_error("There is no stream in this thread.");
  if (fails_ == Fails::without_memory) throw std::bad_alloc();
  auto made = testing::shim_device().start(request, slabs, shapes);
  if (fails_ == Fails::never) return made;
  const auto broken = std::make_shared<Broken>(mx::default_stream(mx::default_device()));
  std::vector<mx::array> arrays;
  for (const auto& shape : shapes) arrays.emplace_back(shape, request.tensors.front().dtype, broken, made);
  return arrays;
}

class StoreDevice : public testing::StoreFixture {
 protected:
  StoreDevice() {
    options_.ram_bytes = 4 << 20;
    options_.directory.clear();
    options_.write = WritePolicy::ram_only;
  }
  std::unique_ptr<BlockStore> open_with(const gather::DeviceGather& device) {
    return std::make_unique<StoreImpl>(options_, true, &device);
  }
};

TEST_F(StoreDevice, GivesTheBytesThatTheCpuGives) {
  const auto specs = many_forms();
  auto blocks = chain(5, 16);
  blocks.push_back(chain(1, 7, 9, blocks.back().key, blocks.back().depth)[0]);
  blocks.push_back(chain(1, 16, 11, blocks.back().key, blocks.back().depth)[0]);
  const auto store = open_with(testing::shim_device());
  put_chain(*store, blocks, specs);
  std::mt19937 random(3);
  const std::int64_t end = blocks.back().depth;
  for (int round = 0; round < 40; ++round) {
    const auto lo = round == 0 ? 0 : static_cast<std::int64_t>(random() % 16);
    const auto hi = round == 0 ? end : end - static_cast<std::int64_t>(random() % 16);
    const auto capacity = hi - lo + static_cast<std::int64_t>(random() % 300);
    const auto before = store->stats().gathered_device_bytes;
    const auto gathered = store->gather(request_for(blocks, lo, hi, capacity));
    expect_rows(gathered, blocks, lo, hi, capacity, specs);
    // All but the state, which is copied once.
    EXPECT_EQ(store->stats().gathered_device_bytes - before, gathered.ram_bytes - 12);
  }
}

TEST_F(StoreDevice, GathersWindowsAndSlotsByName) {
  const auto blocks = chain(3, 16);
  const auto store = open_with(testing::shim_device());
  const auto specs = with_rows(many_forms());
  for (const auto& block : blocks) {
    ASSERT_TRUE(testing::put_window(*store, block, block.start() + 2, block.depth, 7, specs).is_ok());
  }
  auto request = request_for({blocks[1]}, blocks[1].start() + 3, blocks[1].depth, 20);
  request.part = Part::win;
  request.group = 7;
  expect_rows(store->gather(request), {blocks[1]}, blocks[1].start() + 3, blocks[1].depth, 20, specs);
  request.slots = {"2/codes", "0/values"};
  expect_rows(store->gather(request), {blocks[1]}, blocks[1].start() + 3, blocks[1].depth, 20, {specs[5], specs[1]});
  EXPECT_GT(store->stats().gathered_device_bytes, 0u);
}

TEST_F(StoreDevice, NoRowsAreNoLaunch) {
  const auto blocks = chain(2, 16);
  const Watched device;
  const auto store = open_with(device);
  put_chain(*store, blocks, many_forms());
  const int prepared = device.started();
  expect_rows(store->gather(request_for(blocks, 0, 0, 0)), blocks, 0, 0, 0, many_forms());
  expect_rows(store->gather(request_for(blocks, 16, 16, 4)), blocks, 16, 16, 4, many_forms());
  EXPECT_EQ(device.started(), prepared);
}

TEST_F(StoreDevice, WhatItCannotDoTheCpuDoes) {
  for (const auto fails : {Watched::Fails::when_started, Watched::Fails::without_memory}) {
    const Watched device(fails);
    const auto store = open_with(device);
    const auto blocks = chain(4, 16);
    put_chain(*store, blocks, many_forms());
    testing::expect_chain(*store, blocks, many_forms());
    EXPECT_GT(device.started(), 0);
    EXPECT_EQ(store->stats().gathered_device_bytes, 0u);
    EXPECT_EQ(store->stats().device_refusals, 1u);
    EXPECT_FALSE(store->stats().last_error.empty());
  }
}

TEST_F(StoreDevice, WhatItBreaksOffIsAMissAndNothingIsKept) {
  const Watched device(Watched::Fails::when_evaluated);
  const auto store = open_with(device);
  const auto blocks = chain(4, 16);
  put_chain(*store, blocks, many_forms());
  const auto gathered = store->gather(request_for(blocks));
  EXPECT_EQ(gathered.status.code(), StatusCode::Full);
  EXPECT_THAT(gathered.status.message(), ::testing::HasSubstr("out of memory"));
  EXPECT_TRUE(gathered.slots.empty());
  // Nothing is pinned: all of it can go.
  store->trim_ram(0);
  EXPECT_EQ(store->stats().ram_bytes, 0u);
}

TEST_F(StoreDevice, RowsOfFilesAreCopiedByTheCpu) {
  options_.directory = dir_ / "store";
  options_.write = WritePolicy::through;
  const auto specs = many_forms();
  const auto blocks = chain(4, 16);
  {
    const auto store = open_with(testing::shim_device());
    put_chain(*store, blocks, specs);
    ASSERT_TRUE(store->close().is_ok());
  }
  const auto store = open_with(testing::shim_device());
  testing::expect_chain(*store, blocks, specs);
  EXPECT_EQ(store->stats().gathered_device_bytes, 0u);
  // Blocks of both tiers: the later ones only in RAM as yet.
  const auto more = chain(2, 16, 5, blocks.back().key, blocks.back().depth);
  put_chain(*store, more, specs);
  auto all = blocks;
  all.insert(all.end(), more.begin(), more.end());
  const auto gathered = store->gather(request_for(all));
  expect_rows(gathered, all, 0, all.back().depth, -1, specs);
  EXPECT_EQ(gathered.ram_blocks, 2u);
}

TEST_F(StoreDevice, AFormIsTriedOnceBeforeItIsAskedFor) {
  const Watched device;
  const auto store = open_with(device);
  const auto blocks = chain(3, 16);
  put_chain(*store, {blocks[0]}, with_rows(many_forms()));
  // One launch for each dtype and length of rows.
  const int forms = device.started();
  EXPECT_EQ(forms, 5);
  put_chain(*store, {blocks[1], blocks[2]}, with_rows(many_forms()));
  EXPECT_EQ(device.started(), forms);
  EXPECT_EQ(store->stats().gathered_ram_bytes, 0u);
  testing::expect_chain(*store, blocks, with_rows(many_forms()));
  EXPECT_EQ(device.started(), 2 * forms);
}

TEST_F(StoreDevice, RowsStayWhileOthersPushThemOut) {
  options_.ram_bytes = 16 * testing::kPage;
  const auto store = open_with(testing::shim_device());
  std::atomic<bool> done{false};
  std::atomic<int> hits{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      // Where the first block of a chain is pushed out at once, its second finds no place.
      for (unsigned salt = t; !done; salt += 2) {
        for (const auto& block : chain(2, 16, salt % 40)) put_block(*store, block);
      }
    });
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (std::uint32_t salt = 0; hits < 50 && std::chrono::steady_clock::now() < until; ++salt) {
    const auto blocks = chain(2, 16, salt % 40);
    const auto gathered = store->gather(request_for(blocks));
    if (!gathered.status.is_ok()) continue;
    expect_rows(gathered, blocks, 0, 32);
    ++hits;
  }
  done = true;
  for (auto& thread : threads) thread.join();
  EXPECT_GE(hits, 50);
  EXPECT_GT(store->stats().evicted_ram_parts, 0u);
}

}  // namespace
}  // namespace prefixcache::store
