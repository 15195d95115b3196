#include "store/store_handle.h"

#include <atomic>
#include <system_error>
#include <thread>

#include <pthread.h>

#include "gather/device.h"

namespace prefixcache {

std::unique_ptr<BlockStore> BlockStore::open(const Options& options) {
  const auto* device = gather::device_gather();
  return std::make_unique<store::StoreHandle>(std::make_unique<store::StoreImpl>(options, device != nullptr, device),
                                              options.env != nullptr);
}

namespace store {

namespace {

// How often this process and those before it were forked.
std::atomic<unsigned> forks{0};

unsigned watched_forks() {
  [[maybe_unused]] static const int watching = ::pthread_atfork(nullptr, nullptr, [] { ++forks; });
  return forks;
}

}  // namespace

StoreHandle::StoreHandle(std::unique_ptr<StoreImpl> store, bool waits)
    : store_(std::move(store)), waits_(waits), born_(watched_forks()) {}

StoreHandle::~StoreHandle() {
  if (forked()) {
    store_.release();
    return;
  }
  store_->close();
  if (waits_ || store_->at_rest()) return;
  // Its threads use all of it until the disk answers, if it ever does.
  StoreImpl* store = store_.release();
  try {
    std::thread([store] { delete store; }).detach();
  } catch (const std::system_error&) {
    // No thread to wait: it stays.
  }
}

bool StoreHandle::forked() const {
  return forks != born_;
}

Status StoreHandle::closed() {
  return {StatusCode::Closed, "the store belongs to the process that this one was forked from"};
}

Gathered StoreHandle::nothing() {
  Gathered result;
  result.status = closed();
  return result;
}

StoreStats StoreHandle::stats() const {
  if (!forked()) return store_->stats();
  StoreStats stats;
  stats.degraded = true;
  stats.last_error = closed().message();
  return stats;
}

}  // namespace store
}  // namespace prefixcache
