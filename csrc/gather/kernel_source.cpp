#include "gather/kernel_source.h"

#include <functional>
#include <stdexcept>

#include "gather/kernel_text.h"

namespace prefixcache::gather {

namespace {

std::vector<std::string> numbered(const std::string& name, int count) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.push_back(name + std::to_string(i));
  return names;
}

// GATHER_X(x0), then GATHER_OR_X(1, x1) and so on.
void append_choice(std::string& text, const std::string& macro, const std::vector<std::string>& names) {
  text += "GATHER_" + macro + "(" + names.front() + ")\n";
  for (std::size_t i = 1; i < names.size(); ++i) {
    text += "GATHER_OR_" + macro + "(" + std::to_string(i) + ", " + names[i] + ")\n";
  }
}

std::string define(const std::string& name, int value) {
  return "#define " + name + " " + std::to_string(value) + "\n";
}

}  // namespace

KernelTile tile_for(int unit_bytes) {
  if (unit_bytes == 16) return {64, 4};
  if (unit_bytes == 4) return {64, 8};
  return {64, 16};
}

std::vector<int> split_outputs(int count, int most) {
  if (count < 1 || most < 1) return {};
  // Equal launches if that takes at most half as many again, otherwise two sizes.
  const int least = (count + most - 1) / most;
  int launches = least;
  while (launches <= least + least / 2 && count % launches != 0) ++launches;
  if (launches > least + least / 2) launches = least;
  std::vector<int> sizes;
  for (int i = 0; i < launches; ++i) sizes.push_back(count / launches + (i < count % launches ? 1 : 0));
  return sizes;
}

KernelText kernel_text(KernelLanguage language, int unit_bytes, int slabs, int outputs, mlx::core::Dtype dtype,
                       KernelTile tile) {
  if (unit_bytes != 16 && unit_bytes != 4 && unit_bytes != 1) {
    throw std::invalid_argument("[gather_kernel] units have 16, 4 or 1 bytes, not " + std::to_string(unit_bytes));
  }
  const int most = most_buffers(language);
  if (slabs < 1 || outputs < 1 || slabs >= most || outputs > most - slabs) {
    throw std::invalid_argument("[gather_kernel] " + std::to_string(slabs) + " slabs and " + std::to_string(outputs) +
                                " outputs do not fit in one launch");
  }
  const bool metal = language == KernelLanguage::metal;
  const auto arenas = numbered("arena", slabs);

  KernelText text;
  text.inputs = {"table", "tensors"};
  text.inputs.insert(text.inputs.end(), arenas.begin(), arenas.end());
  text.outputs = numbered("out", outputs);
  text.header = define("GATHER_UNIT_BYTES", unit_bytes) + define("GATHER_LANES", tile.lanes) +
                define("GATHER_LOADS", tile.loads) + (metal ? kMetalText : kCudaText);
  text.source = metal ? "GATHER_BEGIN(table, tensors, threadgroup_position_in_grid)\n"
                      : "GATHER_BEGIN(table, tensors, blockIdx)\n";
  append_choice(text.source, "ARENA", arenas);
  append_choice(text.source, "OUTPUT", text.outputs);
  text.source += metal ? "GATHER_END(thread_position_in_threadgroup)\n" : "GATHER_END(threadIdx)\n";
  // What the text depends on, the outputs' type, which MLX writes into the kernel's signature, and the text itself.
  text.name = "prefixcache_gather";
  for (int part : {unit_bytes, slabs, outputs, static_cast<int>(dtype.val()), tile.lanes, tile.loads}) {
    text.name += '_';
    text.name += std::to_string(part);
  }
  text.name += '_' + std::to_string(std::hash<std::string>{}(text.header + text.source));
  return text;
}

}  // namespace prefixcache::gather
