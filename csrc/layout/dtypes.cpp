#include <array>

#include "layout/block_file.h"

namespace prefixcache::layout {
namespace {

struct NamedDtype {
  std::string_view name;
  mlx::core::Dtype dtype;
};

// The names reach the disk: do not change. Another reader of the format knows them too.
constexpr std::array<NamedDtype, 13> kDtypes{{
    {"BOOL", mlx::core::bool_},
    {"U8", mlx::core::uint8},
    {"U16", mlx::core::uint16},
    {"U32", mlx::core::uint32},
    {"U64", mlx::core::uint64},
    {"I8", mlx::core::int8},
    {"I16", mlx::core::int16},
    {"I32", mlx::core::int32},
    {"I64", mlx::core::int64},
    {"F16", mlx::core::float16},
    {"BF16", mlx::core::bfloat16},
    {"F32", mlx::core::float32},
    {"F64", mlx::core::float64},
}};

}  // namespace

std::string_view dtype_name(mlx::core::Dtype dtype) {
  for (const auto& known : kDtypes) {
    if (known.dtype.val() == dtype.val()) return known.name;
  }
  return {};
}

bool dtype_from_name(std::string_view name, mlx::core::Dtype& out) {
  for (const auto& known : kDtypes) {
    if (known.name == name) {
      out = known.dtype;
      return true;
    }
  }
  return false;
}

}  // namespace prefixcache::layout
