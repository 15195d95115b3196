#include <gtest/gtest.h>

#include <map>

#include "layout/block_file.h"

namespace prefixcache::layout {
namespace {

TEST(Dtypes, NamesAreThoseOfSafetensors) {
  const std::map<std::string, mlx::core::Dtype> known = {
      {"BOOL", mlx::core::bool_},   {"U8", mlx::core::uint8},    {"U16", mlx::core::uint16},
      {"U32", mlx::core::uint32},   {"U64", mlx::core::uint64},  {"I8", mlx::core::int8},
      {"I16", mlx::core::int16},    {"I32", mlx::core::int32},   {"I64", mlx::core::int64},
      {"F16", mlx::core::float16},  {"F32", mlx::core::float32}, {"F64", mlx::core::float64},
      {"BF16", mlx::core::bfloat16}};
  for (const auto& [name, dtype] : known) {
    EXPECT_EQ(dtype_name(dtype), name);
    mlx::core::Dtype found = mlx::core::complex64;
    ASSERT_TRUE(dtype_from_name(name, found)) << name;
    EXPECT_EQ(found, dtype) << name;
    EXPECT_EQ(found.size(), dtype.size()) << name;
  }
}

TEST(Dtypes, OthersAreRefused) {
  EXPECT_EQ(dtype_name(mlx::core::complex64), "");
  mlx::core::Dtype untouched = mlx::core::int16;
  for (const char* name : {"", "f32", "F32 ", "F8_E4M3", "C64", "BF1", "BF166"}) {
    EXPECT_FALSE(dtype_from_name(name, untouched)) << name;
  }
  EXPECT_EQ(untouched, mlx::core::int16);
}

}  // namespace
}  // namespace prefixcache::layout
