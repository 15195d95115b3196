// gather_plan.h: which bytes of which blocks go where, checked before anything is copied.
//
// Threads: a plan is built and run by one caller; run() shares the copies with the pool's threads.
// Units:   rows are tokens; bytes for sizes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <mlx/array.h>

#include "gather/kernel_table.h"
#include "gather/thread_pool.h"
#include "prefixcache/gather.h"
#include "store/store_impl.h"

namespace prefixcache::store {

// What one block contributes.
struct BlockRows {
  std::int64_t first = 0;    // position of its first stored row
  std::int64_t count = 0;    // rows stored
  std::int64_t take_lo = 0;  // rows taken, counted from its first
  std::int64_t take_hi = 0;
  std::int64_t place = 0;  // row of the result where they go
};

// Its methods lie in two files: device_plan.cpp has what a GPU does.
class GatherPlan {
 public:
  // Fails with the number of the first block that does not continue the one before it, or lacks a slot asked for by
  // name (NotFound), or that differs from the first one in a slot's name, dtype or shape (Corrupt). Full: more room
  // than the rows can justify.
  static Status make(const GatherRequest& request, std::span<const Source> sources, GatherPlan& out,
                     std::size_t& bad_block);

  GatherPlan() = default;
  ~GatherPlan() { finish(); }
  GatherPlan(GatherPlan&&) = default;
  GatherPlan& operator=(GatherPlan&&) = default;

  // Has the device gather the slots of which all rows lie in its arena. What it cannot do, for whatever reason, is left
  // to run(). Returns what the device said where it refused something.
  std::optional<std::string> start(const gather::DeviceGather& device);

  // Fresh arrays for the other results. Full where the device has no memory for them.
  Status allocate();

  // Copies into these. Returns for each block what went wrong with it, all Ok if nothing did.
  std::vector<Status> run(gather::ThreadPool& threads, Verify verify);

  // Waits for the device, which reads the sources until then. Full where it could not do what it had begun.
  Status finish();

  std::vector<GatheredSlot> take_results();
  std::uint64_t bytes_of(std::size_t block) const { return block_bytes_[block]; }
  // Stored bytes that the device copied.
  std::uint64_t device_bytes() const { return device_bytes_; }

 private:
  struct Slot {
    std::string name;
    mlx::core::Dtype dtype = mlx::core::uint8;
    mlx::core::Shape shape;  // of the result
    int seq_axis = kNoSeqAxis;
    std::size_t outer = 1;
    std::size_t row_bytes = 0;  // of one row of one outer index; the whole tensor if there is no sequence axis
    std::int64_t capacity = 1;
    std::int64_t rows = 1;             // filled
    std::vector<std::size_t> tensors;  // of each block
    std::uint8_t* data = nullptr;
  };

  Status add_slot(const GatherRequest& request, const std::string& name, std::size_t& bad_block);
  Status plan_rows(const GatherRequest& request, std::size_t& bad_block);
  Status copy(const Slot& slot, std::size_t block, Verify verify) const;
  // Slots that the CPU copies, in the order in which their tensors lie in this block's file.
  std::vector<std::size_t> in_file_order(std::size_t block) const;
  Status copy_bytes(const Slot& slot, std::size_t block, std::span<const std::uint8_t> tensor,
                    std::span<const std::uint8_t> guarded, bool check) const;
  Status check_room() const;
  static void clear_spare_rows(const Slot& slot);
  bool find_slabs(std::vector<mlx::core::array>& slabs, gather::KernelRequest& request) const;
  gather::KernelRequest request_for(const gather::KernelRequest& base, std::span<const std::size_t> slots) const;
  std::optional<std::string> start(const gather::DeviceGather& device, const gather::KernelRequest& request,
                                   std::span<const mlx::core::array> slabs, std::span<const std::size_t> slots);

  std::span<const Source> sources_;
  std::vector<BlockRows> blocks_;
  std::vector<bool> like_last_;  // its tensors are those of the block before it
  std::vector<Slot> slots_;
  std::vector<std::optional<mlx::core::array>> arrays_;
  std::vector<std::size_t> by_cpu_;     // numbers of slots
  std::vector<std::size_t> by_device_;  // begun and not waited for
  std::vector<std::uint64_t> block_bytes_;
  std::uint64_t device_bytes_ = 0;
};

}  // namespace prefixcache::store
