// mapped_memory.cpp: memory for images that only the CPU reads.
#include <map>
#include <new>

#include <sys/mman.h>

#include "gather/huge_pages.h"
#include "store/memory.h"

namespace prefixcache::store {

namespace {

// Fresh zeroed memory, on a huge page boundary where it is made of huge pages; null if there is none.
std::uint8_t* map_memory(std::uint64_t size) {
  const std::uint64_t slack = size % gather::kHugePage == 0 ? gather::kHugePage : 0;
  void* address = ::mmap(nullptr, size + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) return nullptr;
  auto* data = static_cast<std::uint8_t*>(address);
  if (slack != 0) {
    const std::uint64_t before = (slack - reinterpret_cast<std::uintptr_t>(data) % slack) % slack;
    if (before != 0) ::munmap(data, before);
    data += before;
    if (before != slack) ::munmap(data + size, slack - before);
    gather::advise_huge_pages(data, size);
  }
  return data;
}

class MappedMemory final : public Memory {
 public:
  ~MappedMemory() override {
    for (const auto& [size, data] : spares_) ::munmap(data, size);
  }

  MemoryRange take(std::uint64_t want, std::uint64_t limit) override {
    // A spare up to a quarter too large is better than fresh memory.
    if (const auto found = spares_.lower_bound(want); found != spares_.end() && found->first <= want + want / 4) {
      const auto [had, data] = *found;
      spares_.erase(found);
      spare_ -= had;
      return {data, had, nullptr, 0};
    }
    if (want > limit) return {};
    shrink(limit - want);
    if (held_ + want > limit) return {};
    std::uint8_t* data = map_memory(want);
    if (data == nullptr) return {};
    held_ += want;
    return {data, want, nullptr, 0};
  }

  void give_back(MemoryRange range) noexcept override {
    try {
      spares_.emplace(range.size, range.data);
      spare_ += range.size;
    } catch (const std::bad_alloc&) {
      ::munmap(range.data, range.size);
      held_ -= range.size;
    }
  }

  void shrink(std::uint64_t most) override {
    while (held_ > most && !spares_.empty()) {
      const auto largest = std::prev(spares_.end());
      ::munmap(largest->second, largest->first);
      held_ -= largest->first;
      spare_ -= largest->first;
      spares_.erase(largest);
    }
  }

  std::uint64_t held() const override { return held_; }
  std::uint64_t spare() const override { return spare_; }

 private:
  std::multimap<std::uint64_t, std::uint8_t*> spares_;  // by size
  std::uint64_t held_ = 0;
  std::uint64_t spare_ = 0;
};

}  // namespace

std::unique_ptr<Memory> mapped_memory() {
  return std::make_unique<MappedMemory>();
}

}  // namespace prefixcache::store
