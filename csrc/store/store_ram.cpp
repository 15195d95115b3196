// store_ram.cpp: memory that the store gives back when it is asked to.
#include <algorithm>
#include <unordered_set>

#include "store/store_impl.h"

namespace prefixcache::store {

std::uint64_t StoreImpl::trim_ram(std::uint64_t target_bytes, std::span<const Key> protected_keys) {
  const std::uint64_t before = pool_->held() + queue_pool_->held();
  queue_pool_->trim(0);
  pool_->trim(target_bytes);
  if (pool_->held() > target_bytes) {
    drop_images(pool_->held() - target_bytes, protected_keys);
    pool_->trim(target_bytes);
  }
  const std::uint64_t after = pool_->held() + queue_pool_->held();
  return before - std::min(before, after);
}

void StoreImpl::drop_images(std::uint64_t bytes, std::span<const Key> protected_keys) {
  const std::unordered_set<Key> kept(protected_keys.begin(), protected_keys.end());
  std::vector<PartRecord*> victims;
  std::vector<std::shared_ptr<Image>> images;  // their memory goes back to the pool outside of the mutex
  Lock lock(mutex_);
  const auto& order = index_.ram_order();
  std::uint64_t dropped = 0;
  for (auto next = order.rbegin(); next != order.rend() && dropped < bytes; ++next) {
    PartRecord* record = *next;
    // One with other references is being read; without memory of its own there is nothing to gain.
    if (record->waiting || record->image->held() == 0 || record->image.use_count() > 1) continue;
    if (!record->on_disk && directory_ != nullptr) continue;
    if (kept.contains(record->image->block) || kept.contains(record->entry->key)) continue;
    dropped += record->image->held();
    victims.push_back(record);
  }
  for (PartRecord* victim : victims) images.push_back(leave_ram(*victim));
  lock.unlock();
}

std::shared_ptr<Image> StoreImpl::leave_ram(PartRecord& record) {
  ++stats_.evicted_ram_parts;
  std::shared_ptr<Image> image = record.image;
  record.forget_image();
  index_.remove_from_ram(record);
  if (!record.on_disk) index_.remove(record);
  return image;
}

}  // namespace prefixcache::store
