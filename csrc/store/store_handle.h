// store_handle.h: the store that callers hold. It belongs to the process that opened it: one that was forked later has
// none of its threads, and locks in it may be held by threads that are not there.
//
// Threads: as BlockStore.
// Owns:    the store; when it is destroyed while a call into the file system hangs, a thread that waits for it does.
// Errors:  in a forked process every call answers Closed or a miss, waits for nothing and leaves the store as it is.
#pragma once

#include <memory>

#include "store/store_impl.h"

namespace prefixcache::store {

class StoreHandle : public BlockStore {
 public:
  // `waits`: the destructor does, for every call into the file system, since that may not outlive the store.
  StoreHandle(std::unique_ptr<StoreImpl> store, bool waits);
  ~StoreHandle() override;

  const Options& options() const override { return store_->options(); }
  Status put(const PutRequest& request, std::uint64_t* added) override {
    return forked() ? closed() : store_->put(request, added);
  }
  std::vector<Presence> presence(std::span<const Key> keys) const override {
    return forked() ? std::vector<Presence>(keys.size()) : store_->presence(keys);
  }
  std::size_t longest_prefix(std::span<const Key> keys, const Key& root, std::int64_t block_size, Part part) override {
    return forked() ? 0 : store_->longest_prefix(keys, root, block_size, part);
  }
  std::vector<Child> children(const Key& parent) override {
    return forked() ? std::vector<Child>() : store_->children(parent);
  }
  ChildMatch longest_child(const Key& parent, std::int64_t start, std::span<const std::uint32_t> tokens,
                           std::span<const ContentKey> content, Part part) override {
    return forked() ? ChildMatch() : store_->longest_child(parent, start, tokens, content, part);
  }
  Point deepest_window(const ChainView& chain, const WindowReach& reach, std::int64_t limit) override {
    return forked() ? Point() : store_->deepest_window(chain, reach, limit);
  }
  Point deepest_state(const ChainView& chain, std::int64_t limit) override {
    return forked() ? Point() : store_->deepest_state(chain, limit);
  }
  std::int64_t deepest_fork(const ChainView& chain, std::int64_t limit) override {
    return forked() ? 0 : store_->deepest_fork(chain, limit);
  }
  void touch(const Key& key, Part part) override {
    if (!forked()) store_->touch(key, part);
  }
  Gathered gather(const GatherRequest& request) override { return forked() ? nothing() : store_->gather(request); }
  Gathered load(const Key& key, Part part) override { return forked() ? nothing() : store_->load(key, part); }
  Status erase(std::span<const Key> keys, std::span<const Part> parts) override {
    return forked() ? closed() : store_->erase(keys, parts);
  }
  Status clear() override { return forked() ? closed() : store_->clear(); }
  Status flush() override { return forked() ? closed() : store_->flush(); }
  std::uint64_t trim_ram(std::uint64_t target_bytes, std::span<const Key> protected_keys) override {
    return forked() ? 0 : store_->trim_ram(target_bytes, protected_keys);
  }
  StoreStats stats() const override;
  Status close() override { return forked() ? Status::ok() : store_->close(); }

 private:
  bool forked() const;
  static Status closed();
  static Gathered nothing();

  std::unique_ptr<StoreImpl> store_;
  const bool waits_;
  const unsigned born_;
};

}  // namespace prefixcache::store
