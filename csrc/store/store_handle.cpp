#include "store/store_handle.h"

#include <system_error>
#include <thread>

namespace prefixcache {

std::unique_ptr<BlockStore> BlockStore::open(const Options& options) {
  return std::make_unique<store::StoreHandle>(std::make_unique<store::StoreImpl>(options), options.env != nullptr);
}

namespace store {

StoreHandle::~StoreHandle() {
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

}  // namespace store
}  // namespace prefixcache
