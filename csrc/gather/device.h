// device.h: gathers by a GPU's kernel, where MLX's default device is one.
//
// Threads: objects are shared; start() belongs to threads that may evaluate MLX arrays.
// Errors:  start() throws std::invalid_argument for what make_kernel_table() refuses and for more slabs than a launch
//          has, std::runtime_error or std::bad_alloc where the device has no memory, no stream of this thread's or no
//          compiler. Nothing is held then, and nothing is on its way.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <mlx/array.h>
#include <mlx/fast.h>

#include "gather/kernel_table.h"

namespace prefixcache::gather {

class DeviceGather {
 public:
  virtual ~DeviceGather() = default;
  // "metal" or "cuda".
  virtual const std::string& name() const = 0;

  // One array for each of the request's tensors, of the shape given, on its way: the caller evaluates it before it lets
  // go of what lies in the slabs. Slabs are evaluated arrays of request.slab_bytes.
  virtual std::vector<mlx::core::array> start(const KernelRequest& request, std::span<const mlx::core::array> slabs,
                                              std::span<const mlx::core::Shape> shapes) const = 0;
};

// The kernel of metal/, by one of MLX's ways to compile and launch it.
class KernelGather : public DeviceGather {
 public:
  using Compile = std::function<mlx::core::fast::CustomKernelFunction(const KernelText&)>;

  KernelGather(std::string name, KernelLanguage language, Compile compile)
      : name_(std::move(name)), language_(language), compile_(std::move(compile)) {}

  const std::string& name() const override { return name_; }
  std::vector<mlx::core::array> start(const KernelRequest& request, std::span<const mlx::core::array> slabs,
                                      std::span<const mlx::core::Shape> shapes) const override;

 private:
  std::vector<mlx::core::array> launch(const KernelTable& table, std::vector<mlx::core::array> inputs,
                                       std::span<const mlx::core::Shape> shapes, mlx::core::Dtype dtype,
                                       int heads) const;

  const std::string name_;
  const KernelLanguage language_;
  const Compile compile_;
  mutable std::mutex mutex_;
  // By bytes of a unit, outputs and their type: what a kernel's text depends on here.
  mutable std::map<std::tuple<int, int, mlx::core::Dtype::Val>, mlx::core::fast::CustomKernelFunction> kernels_;
};

// Null where MLX was built without it or finds no such device.
const DeviceGather* metal_gather();
const DeviceGather* cuda_gather();

// That of MLX's default device; null where it is the CPU, which copies by itself (cpu.h). The environment's
// PREFIXCACHE_GATHER, if it is set, names one instead: cpu, metal or cuda; std::invalid_argument where there is none.
const DeviceGather* device_gather();

}  // namespace prefixcache::gather
