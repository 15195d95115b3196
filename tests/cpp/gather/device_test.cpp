#include "gather/device.h"

#include <cstdlib>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <mlx/device.h>

#include "arrays/mlx_compat.h"
#include "support/gather_cases.h"
#include "support/shim_device.h"

namespace prefixcache::gather {
namespace {

namespace mx = mlx::core;

mx::array slab_of(std::uint64_t number, std::uint64_t bytes) {
  auto slab = make_uninitialised({static_cast<mx::ShapeElem>(bytes)}, mx::uint8);
  for (std::uint64_t i = 0; i < bytes; ++i) slab.data<std::uint8_t>()[i] = testing::arena_byte(number, i);
  return slab;
}

std::vector<mx::array> slabs_of(const KernelRequest& request) {
  std::vector<mx::array> slabs;
  for (std::size_t s = 0; s < request.slab_bytes.size(); ++s) slabs.push_back(slab_of(s, request.slab_bytes[s]));
  return slabs;
}

std::vector<mx::Shape> shapes_of(const KernelRequest& request) {
  const auto items = request.row_bytes / mx::size_of(request.tensors.front().dtype);
  const mx::Shape shape = {static_cast<mx::ShapeElem>(request.heads), static_cast<mx::ShapeElem>(request.capacity),
                           static_cast<mx::ShapeElem>(items)};
  return std::vector<mx::Shape>(request.tensors.size(), shape);
}

void expect_rows(const KernelRequest& request, const std::vector<mx::array>& slabs,
                 const std::vector<mx::array>& made) {
  std::vector<std::span<const std::uint8_t>> bytes;
  for (const auto& slab : slabs) bytes.emplace_back(slab.data<std::uint8_t>(), slab.nbytes());
  ASSERT_EQ(made.size(), request.tensors.size());
  for (std::size_t t = 0; t < made.size(); ++t) {
    const auto want = testing::wanted_rows(request, t, bytes, 0xA5);
    ASSERT_EQ(made[t].nbytes(), want.bytes.size());
    EXPECT_EQ(made[t].dtype(), request.tensors[t].dtype);
    EXPECT_EQ(std::memcmp(made[t].data<std::uint8_t>(), want.bytes.data(), want.bytes.size()), 0) << "tensor " << t;
  }
}

TEST(DeviceGather, LaunchesGiveTheRowsThatTheCpuGives) {
  int launched = 0;
  for (const auto& made : testing::gather_cases(1, 12'000)) {
    if (make_kernel_table(made.request).groups == 0) continue;
    SCOPED_TRACE(made.name);
    const auto slabs = slabs_of(made.request);
    expect_rows(made.request, slabs, testing::shim_device().start(made.request, slabs, shapes_of(made.request)));
    ++launched;
  }
  EXPECT_GT(launched, 25);
}

// Blocks in as many slabs as a launch has, and more tensors than one launch has outputs.
KernelRequest wide_request(std::size_t tensors, std::size_t slabs) {
  KernelRequest request;
  request.heads = 2;
  request.row_bytes = 16;
  request.rows = static_cast<std::int64_t>(4 * slabs);
  request.capacity = request.rows + 3;
  for (std::uint64_t t = 0; t < tensors; ++t) request.tensors.push_back({{t * 128}, mx::float16});
  for (std::uint64_t s = 0; s < slabs; ++s) {
    request.slab_bytes.push_back(tensors * 128 + 64 * s);
    request.pieces.push_back({s, 64 * s, tensors * 128, 0, 4, 0, 4, static_cast<std::int64_t>(4 * s)});
  }
  return request;
}

TEST(DeviceGather, ManyTensorsTakeSeveralLaunches) {
  for (const std::size_t tensors : {1, 16, 17, 40}) {
    for (const std::size_t slabs : {1, 2, kSlabsALaunch}) {
      const auto request = wide_request(tensors, slabs);
      const auto arrays = slabs_of(request);
      expect_rows(request, arrays, testing::shim_device().start(request, arrays, shapes_of(request)));
    }
  }
}

TEST(DeviceGather, ResultsAreTheOnlyOwnersOfTheirBuffers) {
  const auto request = wide_request(3, 2);
  auto made = testing::shim_device().start(request, slabs_of(request), shapes_of(request));
  mx::eval(made);
  for (const auto& array : made) EXPECT_TRUE(array.is_donatable());
}

TEST(DeviceGather, RefusesWhatNoLaunchCanDo) {
  const auto& device = testing::shim_device();
  const auto request = wide_request(2, 2);
  const auto slabs = slabs_of(request);
  const auto shapes = shapes_of(request);
  EXPECT_NO_THROW(device.start(request, slabs, shapes));
  EXPECT_THROW(device.start(request, std::span(slabs).first(1), shapes), std::invalid_argument);
  EXPECT_THROW(device.start(request, slabs, std::span(shapes).first(1)), std::invalid_argument);
  const auto many = wide_request(2, kSlabsALaunch + 1);
  EXPECT_THROW(device.start(many, slabs_of(many), shapes_of(many)), std::invalid_argument);
  auto outside = request;
  outside.pieces[1].at += 64;
  EXPECT_THROW(device.start(outside, slabs, shapes), std::invalid_argument);
  auto nothing = request;
  nothing.pieces.clear();
  nothing.clear_spare = false;
  EXPECT_THROW(device.start(nothing, slabs, shapes), std::invalid_argument);
}

class Environment {
 public:
  explicit Environment(const char* value) {
    if (const char* before = std::getenv("PREFIXCACHE_GATHER")) before_ = before;
    ::setenv("PREFIXCACHE_GATHER", value, 1);
  }
  ~Environment() {
    before_.empty() ? ::unsetenv("PREFIXCACHE_GATHER") : ::setenv("PREFIXCACHE_GATHER", before_.c_str(), 1);
  }

 private:
  std::string before_;
};

TEST(DeviceGather, TheEnvironmentMayNameOne) {
  {
    const Environment environment("cpu");
    EXPECT_EQ(device_gather(), nullptr);
  }
  {
    const Environment environment("gpu");
    try {
      device_gather();
      FAIL() << "an unknown name was taken";
    } catch (const std::invalid_argument& e) {
      EXPECT_STREQ(e.what(), "PREFIXCACHE_GATHER is 'gpu', expected cpu, metal or cuda");
    }
  }
  for (const auto& [name, device] : {std::pair{"metal", metal_gather()}, std::pair{"cuda", cuda_gather()}}) {
    const Environment environment(name);
    if (device == nullptr) {
      EXPECT_THROW(device_gather(), std::invalid_argument) << name;
    } else {
      EXPECT_EQ(device_gather(), device);
    }
  }
}

TEST(DeviceGather, FollowsTheDefaultDevice) {
  const Environment environment("");
  const bool gpu = mx::default_device().type == mx::Device::gpu;
  EXPECT_EQ(device_gather() != nullptr, gpu);
}

}  // namespace
}  // namespace prefixcache::gather
