// write_cases.cpp: what the GPU's tests and benchmark run, as JSON: the kernel's text and checked tables, by the same
// code that a store uses.
//
// Usage: write_cases test|bench >cases.json
#include <cstring>
#include <iostream>
#include <numeric>

#include "gather/kernel_source.h"
#include "gather/kernel_table.h"
#include "support/gather_cases.h"

namespace {

using namespace prefixcache;
namespace mx = mlx::core;

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '\n') {
      out += "\\n";
      continue;
    }
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

template <typename Items, typename Write>
std::string list(const Items& items, Write write) {
  std::string out = "[";
  for (const auto& item : items) out += (out.size() > 1 ? ", " : "") + write(item);
  return out + "]";
}

std::string numbers(const std::vector<std::uint64_t>& values) {
  return list(values, [](std::uint64_t value) { return std::to_string(value); });
}

std::string dtype_text(mx::Dtype dtype) {
  const std::pair<mx::Dtype, const char*> names[] = {
      {mx::uint8, "uint8"},   {mx::int8, "int8"},         {mx::uint16, "uint16"}, {mx::float16, "float16"},
      {mx::uint32, "uint32"}, {mx::bfloat16, "bfloat16"}, {mx::int32, "int32"},   {mx::float32, "float32"}};
  for (const auto& [known, name] : names) {
    if (known == dtype) return name;
  }
  throw std::invalid_argument("a dtype without a name here");
}

std::string request_json(const gather::KernelRequest& request) {
  return "\"slab_bytes\": " + numbers(request.slab_bytes) + ", \"heads\": " + std::to_string(request.heads) +
         ", \"row_bytes\": " + std::to_string(request.row_bytes) + ", \"rows\": " + std::to_string(request.rows) +
         ", \"capacity\": " + std::to_string(request.capacity) +
         ", \"clear_spare\": " + (request.clear_spare ? "true" : "false") + ", \"offsets\": " +
         list(request.tensors, [](const gather::ArenaTensor& tensor) { return numbers(tensor.offsets); }) +
         ", \"dtype\": " + quoted(dtype_text(request.tensors.front().dtype)) +
         ", \"pieces\": " + list(request.pieces, [](const gather::ArenaRows& r) {
           return numbers({r.slab, r.at, r.layout, static_cast<std::uint64_t>(r.stored),
                           static_cast<std::uint64_t>(r.lo), static_cast<std::uint64_t>(r.hi),
                           static_cast<std::uint64_t>(r.place)});
         });
}

std::string table_json(const gather::KernelTable& table) {
  return "\"unit_bytes\": " + std::to_string(table.unit_bytes) + ", \"groups\": " + std::to_string(table.groups) +
         ", \"lanes\": " + std::to_string(table.tile.lanes) + ", \"words\": " + numbers(table.words) +
         ", \"tensors_at\": " + std::to_string(table.tensors_at);
}

std::string text_json(const gather::KernelText& text) {
  return "{\"name\": " + quoted(text.name) + ", \"inputs\": " + list(text.inputs, quoted) +
         ", \"outputs\": " + list(text.outputs, quoted) + ", \"header\": " + quoted(text.header) +
         ", \"source\": " + quoted(text.source) + "}";
}

// One for a launch of this many outputs.
std::string text_for(const gather::KernelRequest& request, const gather::KernelTable& table, std::size_t slabs,
                     std::size_t outputs) {
  return text_json(gather::kernel_text(gather::KernelLanguage::cuda, table.unit_bytes, static_cast<int>(slabs),
                                       static_cast<int>(outputs), request.tensors.front().dtype, table.tile));
}

void write_tests() {
  std::string out = "{\"cases\": [";
  for (const auto& made : testing::gather_cases(6, 400'000)) {
    const auto& request = made.request;
    const auto table = gather::make_kernel_table(request);
    out += (out.back() == '[' ? "\n" : ",\n") + ("{\"name\": " + quoted(made.name)) + ", " + request_json(request) +
           ", " + table_json(table) +
           ", \"text\": " + text_for(request, table, request.slab_bytes.size(), request.tensors.size()) + "}";
  }
  std::cout << out << "]}\n";
}

// An 8B model: 32 layers of keys and values, 8 heads of 128 halves, blocks in shuffled order.
gather::KernelRequest of_8b(std::int64_t tokens, std::int64_t block_rows, std::int64_t room) {
  const auto tensor_bytes = static_cast<std::uint64_t>(8 * 256 * block_rows);
  gather::KernelRequest request;
  request.heads = 8;
  request.row_bytes = 256;
  request.rows = tokens;
  request.capacity = tokens + room;
  for (std::uint64_t t = 0; t < 64; ++t) request.tensors.push_back({{t * tensor_bytes}, mx::float16});
  const std::uint64_t image_bytes = 64 * tensor_bytes;
  std::vector<std::uint64_t> slots(static_cast<std::size_t>(tokens / block_rows));
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), std::mt19937(5));
  request.slab_bytes = {image_bytes * slots.size()};
  for (std::size_t b = 0; b < slots.size(); ++b) {
    request.pieces.push_back({0, slots[b] * image_bytes, image_bytes, 0, block_rows, 0, block_rows,
                              static_cast<std::int64_t>(b) * block_rows});
  }
  return request;
}

void write_benchmark() {
  std::string out = "{\"cases\": [";
  for (std::int64_t tokens : {8192, 16384, 32768, 65536}) {
    for (std::int64_t block_rows : {256, 32}) {
      // Room as a restore leaves it: a prefill step and a growth step.
      for (std::int64_t room : {0, 2304}) {
        const auto request = of_8b(tokens, block_rows, room);
        const auto table = gather::make_kernel_table(request);
        out += (out.back() == '[' ? "\n" : ",\n") + ("{\"block_rows\": " + std::to_string(block_rows)) + ", " +
               "\"image_bytes\": " + std::to_string(request.pieces.front().bytes) + ", " + request_json(request) +
               ", " + table_json(table) + ", \"texts\": {";
        for (std::size_t outputs : {1, 8, 16, 64}) {
          out += (out.back() == '{' ? "" : ", ") + quoted(std::to_string(outputs)) + ": " +
                 text_for(request, table, gather::kSlabsALaunch, outputs);
        }
        out += "}}";
      }
    }
  }
  std::cout << out << "]}\n";
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 2 && std::strcmp(arguments[1], "test") == 0) {
    write_tests();
  } else if (count == 2 && std::strcmp(arguments[1], "bench") == 0) {
    write_benchmark();
  } else {
    std::cerr << "usage: write_cases test|bench\n";
    return 2;
  }
}
