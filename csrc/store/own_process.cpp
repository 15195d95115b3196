#include "store/own_process.h"

#include <atomic>

#include <pthread.h>

namespace prefixcache::store {

namespace {

// How often this process and those before it were forked.
std::atomic<unsigned> forks{0};

unsigned watched_forks() {
  [[maybe_unused]] static const int watching = ::pthread_atfork(nullptr, nullptr, [] { ++forks; });
  return forks;
}

class OwnProcess : public BlockStore {
 public:
  explicit OwnProcess(std::unique_ptr<BlockStore> store) : store_(std::move(store)), born_(watched_forks()) {}
  ~OwnProcess() override {
    if (forked()) store_.release();
  }

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
  StoreStats stats() const override {
    if (!forked()) return store_->stats();
    StoreStats stats;
    stats.degraded = true;
    stats.last_error = closed().message();
    return stats;
  }
  Status close() override { return forked() ? Status::ok() : store_->close(); }

 private:
  bool forked() const { return forks != born_; }
  static Status closed() {
    return {StatusCode::Closed, "the store belongs to the process that this one was forked from"};
  }
  static Gathered nothing() {
    Gathered result;
    result.status = closed();
    return result;
  }

  std::unique_ptr<BlockStore> store_;
  const unsigned born_;
};

}  // namespace

std::unique_ptr<BlockStore> for_own_process(std::unique_ptr<BlockStore> store) {
  return std::make_unique<OwnProcess>(std::move(store));
}

}  // namespace prefixcache::store
