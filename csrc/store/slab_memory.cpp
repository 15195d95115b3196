// slab_memory.cpp: memory for images that a kernel reads where they lie.
#include "store/slab_memory.h"

#include <algorithm>
#include <limits>
#include <map>
#include <new>
#include <set>
#include <utility>

#include "arrays/mlx_compat.h"
#include "gather/kernel_source.h"

namespace prefixcache::store {

namespace {

// As many as one launch can name: enough that giving one up gives something back and keeps most.
constexpr std::uint64_t kSlabs = gather::kSlabsALaunch;

std::uint64_t whole(std::uint64_t bytes, std::uint64_t unit) {
  return bytes / unit * unit;
}

// Null where there is no memory for it.
std::shared_ptr<Slab> make_slab(const MakeArray& make, std::uint64_t bytes, std::uint64_t number) {
  // Extents of arrays are 32-bit.
  using Extent = mlx::core::ShapeElem;
  const std::uint64_t pages = bytes / kMemoryPage;
  if (pages > static_cast<std::uint64_t>(std::numeric_limits<Extent>::max())) return nullptr;
  std::shared_ptr<Slab> slab;
  why_no_memory([&] {
    auto memory = make({static_cast<Extent>(pages), static_cast<Extent>(kMemoryPage)}, mlx::core::uint8);
    auto* data = memory.data<std::uint8_t>();
    slab = std::make_shared<Slab>(Slab{std::move(memory), bytes, data, number});
  });
  return slab;
}

class SlabMemory final : public Memory {
 public:
  explicit SlabMemory(MakeArray make) : make_(std::move(make)) {}

  MemoryRange take(std::uint64_t want, std::uint64_t limit) override {
    // The best fit; of equals the one in the oldest slab, so that the younger ones run empty.
    auto best = by_size_.lower_bound({want, 0, 0});
    if (best == by_size_.end()) {
      if (!add_slab(want, limit)) return {};
      best = by_size_.lower_bound({want, 0, 0});
    }
    const auto [size, number, offset] = *best;
    Part& part = parts_.at(number);
    if (size > want) add_free(part, offset + want, size - want);
    remove_free(part, offset);
    return {part.slab->data + offset, want, part.slab, offset};
  }

  void give_back(MemoryRange range) noexcept override {
    Part& part = parts_.at(range.slab->number);
    std::uint64_t begin = range.offset;
    std::uint64_t end = range.offset + range.size;
    if (const auto after = part.free.find(end); after != part.free.end()) {
      end += after->second;
      remove_free(part, after->first);
    }
    if (auto before = part.free.lower_bound(begin); before != part.free.begin()) {
      --before;
      if (before->first + before->second == begin) {
        begin = before->first;
        remove_free(part, begin);
      }
    }
    try {
      add_free(part, begin, end - begin);
    } catch (const std::bad_alloc&) {
      // Out of use for as long as its slab lives.
    }
  }

  void shrink(std::uint64_t most) override {
    while (held_ > most) {
      const auto largest = largest_unused();
      if (largest == parts_.end()) return;
      give_up(largest);
    }
  }

  std::uint64_t held() const override { return held_; }
  std::uint64_t spare() const override { return spare_; }

 private:
  struct Part {
    std::shared_ptr<const Slab> slab;
    std::map<std::uint64_t, std::uint64_t> free;  // sizes by offset; no two of them touch
    bool unused() const { return !free.empty() && free.begin()->second == slab->bytes; }
  };
  struct Free {
    std::uint64_t size, slab, offset;
    auto operator<=>(const Free&) const = default;
  };
  using Parts = std::map<std::uint64_t, Part>;

  // Throws std::bad_alloc; nothing has changed then.
  void add_free(Part& part, std::uint64_t offset, std::uint64_t size) {
    const auto added = by_size_.insert({size, part.slab->number, offset}).first;
    try {
      part.free.emplace(offset, size);
    } catch (const std::bad_alloc&) {
      by_size_.erase(added);
      throw;
    }
    spare_ += size;
  }

  void remove_free(Part& part, std::uint64_t offset) {
    const auto found = part.free.find(offset);
    by_size_.erase({found->second, part.slab->number, offset});
    spare_ -= found->second;
    part.free.erase(found);
  }

  Parts::iterator largest_unused() {
    auto largest = parts_.end();
    for (auto part = parts_.begin(); part != parts_.end(); ++part) {
      if (!part->second.unused()) continue;
      if (largest == parts_.end() || part->second.slab->bytes > largest->second.slab->bytes) largest = part;
    }
    return largest;
  }

  void give_up(Parts::iterator part) {
    held_ -= part->second.slab->bytes;
    remove_free(part->second, 0);
    parts_.erase(part);
  }

  // A slab with room for `want`. Those that are unused are too small for it.
  bool add_slab(std::uint64_t want, std::uint64_t limit) {
    std::uint64_t used = held_;
    for (const auto& [number, part] : parts_) used -= part.unused() ? part.slab->bytes : 0;
    if (want > limit || used > limit - want) return false;
    shrink(limit - want);
    // Pieces of one size leave nothing over, and there are no more slabs than a launch can name.
    const auto with_room = [want](std::uint64_t bytes) { return std::max(want, whole(bytes + want - 1, want)); };
    std::uint64_t bytes = std::min(whole(limit - held_, kMemoryPage), with_room(limit / kSlabs));
    for (;;) {
      if (std::shared_ptr<const Slab> slab = make_slab(make_, bytes, next_number_)) {
        const auto part = parts_.emplace(next_number_, Part{std::move(slab), {}}).first;
        try {
          add_free(part->second, 0, bytes);
        } catch (const std::bad_alloc&) {
          parts_.erase(part);
          throw;
        }
        ++next_number_;
        held_ += bytes;
        return true;
      }
      // The bound may be more than the device has.
      if (bytes > want) {
        bytes = with_room(bytes / 2);
      } else if (const auto unused = largest_unused(); unused != parts_.end()) {
        give_up(unused);
      } else {
        return false;
      }
    }
  }

  const MakeArray make_;
  Parts parts_;  // by the number of the slab
  std::set<Free> by_size_;
  std::uint64_t next_number_ = 0;
  std::uint64_t held_ = 0;
  std::uint64_t spare_ = 0;
};

}  // namespace

std::unique_ptr<Memory> slab_memory(MakeArray make) {
  return std::make_unique<SlabMemory>(std::move(make));
}

std::unique_ptr<Memory> slab_memory() {
  return slab_memory(make_uninitialised);
}

}  // namespace prefixcache::store
