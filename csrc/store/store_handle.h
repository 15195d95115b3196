// store_handle.h: the store that callers hold. It outlives no call of theirs; what hangs in the disk outlives it.
//
// Threads: as BlockStore.
// Owns:    the store; when it is destroyed while a call into the file system hangs, a thread that waits for it does.
#pragma once

#include <memory>

#include "store/store_impl.h"

namespace prefixcache::store {

class StoreHandle : public BlockStore {
 public:
  // `waits`: the destructor does, for every call into the file system, since that may not outlive the store.
  StoreHandle(std::unique_ptr<StoreImpl> store, bool waits) : store_(std::move(store)), waits_(waits) {}
  ~StoreHandle() override;

  const Options& options() const override { return store_->options(); }
  Status put(const PutRequest& request, std::uint64_t* added) override { return store_->put(request, added); }
  std::vector<Presence> presence(std::span<const Key> keys) const override { return store_->presence(keys); }
  std::size_t longest_prefix(std::span<const Key> keys, const Key& root, std::int64_t block_size, Part part) override {
    return store_->longest_prefix(keys, root, block_size, part);
  }
  std::vector<Child> children(const Key& parent) override { return store_->children(parent); }
  ChildMatch longest_child(const Key& parent, std::int64_t start, std::span<const std::uint32_t> tokens,
                           std::span<const ContentKey> content, Part part) override {
    return store_->longest_child(parent, start, tokens, content, part);
  }
  Point deepest_window(const ChainView& chain, const WindowReach& reach, std::int64_t limit) override {
    return store_->deepest_window(chain, reach, limit);
  }
  Point deepest_state(const ChainView& chain, std::int64_t limit) override {
    return store_->deepest_state(chain, limit);
  }
  std::int64_t deepest_fork(const ChainView& chain, std::int64_t limit) override {
    return store_->deepest_fork(chain, limit);
  }
  void touch(const Key& key, Part part) override { store_->touch(key, part); }
  Gathered gather(const GatherRequest& request) override { return store_->gather(request); }
  Gathered load(const Key& key, Part part) override { return store_->load(key, part); }
  Status erase(std::span<const Key> keys, std::span<const Part> parts) override { return store_->erase(keys, parts); }
  Status clear() override { return store_->clear(); }
  Status flush() override { return store_->flush(); }
  std::uint64_t trim_ram(std::uint64_t target_bytes, std::span<const Key> protected_keys) override {
    return store_->trim_ram(target_bytes, protected_keys);
  }
  StoreStats stats() const override { return store_->stats(); }
  Status close() override { return store_->close(); }

 private:
  std::unique_ptr<StoreImpl> store_;
  const bool waits_;
};

}  // namespace prefixcache::store
