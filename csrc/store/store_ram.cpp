// store_ram.cpp: who may be in RAM: room for newcomers, and memory that is given back on demand.
#include <algorithm>
#include <chrono>
#include <unordered_set>

#include "store/store_impl.h"

namespace prefixcache::store {

namespace {

// While a gather reads it, its memory stays whatever becomes of the record.
bool is_read(const PartRecord& record) {
  return record.image != nullptr && record.image.use_count() > 1;
}

// What waits to be written, is being read, has nothing to give back or is to be kept does not leave on demand.
bool must_stay(const PartRecord& record, const std::unordered_set<Key>& kept) {
  if (record.waiting || record.image->held() == 0 || is_read(record)) return true;
  return kept.contains(record.image->block) || kept.contains(record.entry->key);
}

const Slab* slab_of(const PartRecord& record) {
  return record.image->buffer == nullptr ? nullptr : record.image->buffer->slab().get();
}

// While it lives, the writer does not stand back.
class Hurry {
 public:
  ~Hurry() {
    if (writer_ != nullptr) writer_->hurry_ends();
  }
  Hurry() = default;
  Hurry(const Hurry&) = delete;
  Hurry& operator=(const Hurry&) = delete;
  void begin(Writer* writer) {
    if (writer_ != nullptr || writer == nullptr) return;
    writer_ = writer;
    writer_->hurry_begins();
  }

 private:
  Writer* writer_ = nullptr;
};

}  // namespace

std::shared_ptr<Buffer> StoreImpl::acquire_buffer(const Image& image) {
  const std::uint64_t bytes = image.data_bytes;
  const bool fits = BufferPool::rounded(bytes) <= pool_->limit();
  if (!fits && writer_ == nullptr) return nullptr;
  BufferPool& pool = fits ? *pool_ : *queue_pool_;
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                        std::chrono::duration<double>(options_.put_wait_seconds));
  Hurry hurry;
  for (;;) {
    const std::uint64_t seen = pool.changes();
    if (auto buffer = pool.acquire(bytes)) return buffer;
    const Evicted evicted = fits ? evict_one_from_ram(image) : Evicted::none;
    if (evicted == Evicted::one) continue;
    if (evicted == Evicted::none && !memory_may_come(pool)) return nullptr;
    hurry.begin(writer_.get());
    const auto now = Clock::now();
    if (now >= until) return nullptr;
    // Not every change is told: what the writer holds a moment longer, say.
    pool.wait_for_change(seen, std::min<Clock::time_point>(until, now + std::chrono::milliseconds(10)));
  }
}

bool StoreImpl::memory_may_come(const BufferPool& pool) const {
  if (writer_ != nullptr && !writer_->is_idle()) return true;
  if (&pool != pool_.get()) return pool.in_use() > 0;
  // What is in use beyond the index is read by gathers, or about to be indexed.
  std::uint64_t indexed = 0;
  Lock lock(mutex_);
  for (const PartRecord* record : index_.ram_order()) {
    if (is_read(*record)) return true;
    indexed += record->image->held();
  }
  return pool.in_use() > indexed;
}

PartRecord* StoreImpl::victim_for(const Image& newcomer, const std::list<PartRecord*>& order, bool in_ram) {
  // Nobody would find the newcomer without the blocks before it, so they stay.
  const auto& header = newcomer.header;
  const bool is_kv = header.part == Part::kv;
  PartRecord* parent = is_kv ? nullptr : index_.find(newcomer.block, Part::kv);
  if (parent == nullptr) parent = index_.find(header.parent, Part::kv);
  const bool begins_chain = header.depth == static_cast<std::int64_t>(header.tokens.size());
  if (parent == nullptr && !begins_chain && is_kv) return nullptr;
  NeededParts needed(index_, newcomer, asked_for_);
  const auto oldest = [&]() -> PartRecord* {
    const auto found = std::find_if(order.rbegin(), order.rend(), [&](const auto* record) {
      if (record->waiting ? !record->leaving : in_ram && is_read(*record)) return false;
      return !needed.has(*record);
    });
    return found == order.rend() ? nullptr : *found;
  };
  PartRecord* victim = oldest();
  if (victim != nullptr && victim == parent) {
    index_.touch(*parent);
    victim = oldest();
  }
  return victim == parent ? nullptr : victim;
}

StoreImpl::Evicted StoreImpl::evict_one_from_ram(const Image& newcomer) {
  // Its memory goes back to the pool when the last gather that reads it ends.
  std::shared_ptr<Image> image;
  Lock lock(mutex_);
  const auto& order = index_.ram_order();
  PartRecord* victim = victim_for(newcomer, order, true);
  if (victim == nullptr) {
    // What is on the disk too may leave the RAM whoever needs it.
    const auto found = std::find_if(order.rbegin(), order.rend(), [](const auto* record) {
      return !record->waiting && record->on_disk && !is_read(*record);
    });
    if (found == order.rend()) return Evicted::none;
    victim = *found;
  }
  if (victim->waiting) return Evicted::soon;
  if (victim->unwritten && !disk_rests()) {
    // Several at a time: the next newcomer would wait for the next one.
    std::uint64_t bytes = 0;
    while (victim != nullptr && !victim->waiting && victim->unwritten && bytes <= pool_->limit() / 16) {
      bytes += victim->image->held();
      write_before_leaving(*victim);
      victim = victim_for(newcomer, order, true);
    }
    return Evicted::soon;
  }
  image = leave_ram(*victim);
  lock.unlock();
  return Evicted::one;
}

bool StoreImpl::written_later(const Image& image) const {
  if (pool_->limit() == 0 || image.memory() > pool_->limit()) return false;
  return options_.write == WritePolicy::back || disk_rests();
}

void StoreImpl::queue_write(PartRecord& record) {
  if (!record.unwritten || record.image == nullptr) return;
  record.unwritten = false;
  record.waiting = true;
  // Its memory is the RAM tier's.
  writer_->push(record.image, 0);
}

void StoreImpl::write_before_leaving(PartRecord& victim) {
  // The blocks before it come first, so that whatever is on the disk is a prefix.
  std::vector<PartRecord*> line;
  const Key block = victim.image->block;
  for (Entry* entry = index_.find(block); entry != nullptr;) {
    if (PartRecord* record = entry->parts[static_cast<int>(Part::kv)].get()) line.push_back(record);
    Entry* before = entry->parent_known ? index_.find(entry->parent) : nullptr;
    entry = before != nullptr && before->depth < entry->depth ? before : nullptr;
  }
  for (auto record = line.rbegin(); record != line.rend(); ++record) {
    if (*record != &victim) queue_write(**record);
  }
  queue_write(victim);
  victim.leaving = true;
}

void StoreImpl::queue_unwritten() {
  if (writer_ == nullptr) return;
  Lock lock(mutex_);
  // Parents first.
  for (PartRecord* record : index_.ram_order()) queue_write(*record);
}

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
  std::vector<std::shared_ptr<Image>> images;  // their memory goes back to the pool outside of the mutex
  Lock lock(mutex_);
  const auto victims = arena_ ? images_of_oldest_slabs(bytes, kept) : oldest_images(bytes, kept);
  for (PartRecord* victim : victims) images.push_back(leave_ram(*victim));
  lock.unlock();
}

bool StoreImpl::can_go(const PartRecord& record, const std::unordered_set<Key>& kept) const {
  return !must_stay(record, kept) && (record.on_disk || directory_ == nullptr);
}

void StoreImpl::write_if_it_can_go_then(PartRecord& record, const std::unordered_set<Key>& kept) {
  if (record.unwritten && !must_stay(record, kept) && !disk_rests()) write_before_leaving(record);
}

std::vector<PartRecord*> StoreImpl::oldest_images(std::uint64_t bytes, const std::unordered_set<Key>& kept) {
  std::vector<PartRecord*> victims;
  const auto& order = index_.ram_order();
  std::uint64_t dropped = 0;
  for (auto next = order.rbegin(); next != order.rend() && dropped < bytes; ++next) {
    if (can_go(**next, kept)) {
      dropped += (*next)->image->held();
      victims.push_back(*next);
    } else if (!(*next)->on_disk) {
      write_if_it_can_go_then(**next, kept);
    }
  }
  return victims;
}

std::vector<PartRecord*> StoreImpl::images_of_oldest_slabs(std::uint64_t bytes, const std::unordered_set<Key>& kept) {
  // A slab is as old as the newest image in it. One in which something stays gives nothing back.
  std::vector<const Slab*> slabs;
  std::unordered_set<const Slab*> seen, lasting, emptied, later;
  const auto& order = index_.ram_order();
  for (const PartRecord* record : order) {
    const Slab* slab = slab_of(*record);
    if (slab == nullptr) continue;
    if (seen.insert(slab).second) slabs.push_back(slab);
    if (!can_go(*record, kept)) lasting.insert(slab);
  }
  std::uint64_t dropped = 0;
  for (auto slab = slabs.rbegin(); slab != slabs.rend() && dropped < bytes; ++slab) {
    if (lasting.contains(*slab)) {
      later.insert(*slab);
    } else {
      emptied.insert(*slab);
      dropped += (*slab)->bytes;
    }
  }
  for (auto next = order.rbegin(); next != order.rend(); ++next) {
    if (!(*next)->on_disk && later.contains(slab_of(**next))) write_if_it_can_go_then(**next, kept);
  }
  return images_in(emptied, kept);
}

std::vector<PartRecord*> StoreImpl::images_in(const std::unordered_set<const Slab*>& slabs,
                                              const std::unordered_set<Key>& kept) const {
  std::vector<PartRecord*> victims;
  std::unordered_set<const PartRecord*> going;
  // Nobody would find a block without those before it.
  const auto is_orphan = [&](const PartRecord& record) {
    if (directory_ != nullptr || record.part != Part::kv) return false;
    return going.contains(index_.find(record.entry->parent, Part::kv));
  };
  // Parents come before their children.
  for (PartRecord* record : index_.ram_order()) {
    if (!can_go(*record, kept) || (!slabs.contains(slab_of(*record)) && !is_orphan(*record))) continue;
    going.insert(record);
    victims.push_back(record);
  }
  std::reverse(victims.begin(), victims.end());
  return victims;
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
