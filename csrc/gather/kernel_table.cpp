#include "gather/kernel_table.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace prefixcache::gather {

namespace {

// What one launch may address: MLX's grid is in ints, the kernel counts a head's units in 32 bits, and CUDA's second
// and third dimension have 16.
constexpr std::uint64_t kMostUnits = std::numeric_limits<std::int32_t>::max();
constexpr std::uint64_t kMostHeads = 65535;
constexpr std::size_t kMostLayouts = 65535;

struct Piece {
  std::uint64_t slab, layout, from, stride, length, to;  // bytes
};

[[noreturn]] void refuse(const std::string& why) {
  throw std::invalid_argument("[gather_kernel] " + why);
}

std::string at(std::size_t i) {
  return "piece " + std::to_string(i);
}

std::uint64_t times(std::uint64_t a, std::uint64_t b) {
  std::uint64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) refuse("sizes that cannot be addressed");
  return product;
}

std::uint64_t plus(std::uint64_t a, std::uint64_t b) {
  std::uint64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) refuse("sizes that cannot be addressed");
  return sum;
}

void check_outputs(const KernelRequest& request) {
  if (request.rows < 0 || request.capacity < request.rows) {
    refuse("a capacity of " + std::to_string(request.capacity) + " for " + std::to_string(request.rows) + " rows");
  }
  if (request.tensors.empty()) refuse("no tensors");
  if (request.row_bytes == 0 || request.heads == 0) refuse("rows without bytes");
  if (request.heads > kMostHeads) refuse(std::to_string(request.heads) + " heads");
  if (request.slab_bytes.empty() || request.slab_bytes.size() >= kClearedSlab) {
    refuse(std::to_string(request.slab_bytes.size()) + " slabs");
  }
  const auto& first = request.tensors.front();
  for (const auto& tensor : request.tensors) {
    if (tensor.dtype != first.dtype) refuse("tensors of several dtypes in one launch");
    if (tensor.offsets.size() != first.offsets.size()) refuse("tensors of different numbers of layouts");
  }
  if (first.offsets.empty() || first.offsets.size() > kMostLayouts) {
    refuse(std::to_string(first.offsets.size()) + " layouts");
  }
  if (request.row_bytes % mlx::core::size_of(first.dtype) != 0) refuse("rows that are no whole number of items");
}

// Where the last tensor of each layout begins.
std::vector<std::uint64_t> last_offsets(const KernelRequest& request) {
  std::vector<std::uint64_t> last(request.tensors.front().offsets.size(), 0);
  for (const auto& tensor : request.tensors) {
    for (std::size_t layout = 0; layout < last.size(); ++layout) {
      last[layout] = std::max(last[layout], tensor.offsets[layout]);
    }
  }
  return last;
}

// Everything a piece can make the kernel touch, for any head and any tensor.
Piece check_piece(const KernelRequest& request, const std::vector<std::uint64_t>& last, std::size_t i,
                  std::int64_t next) {
  const ArenaRows& rows = request.pieces[i];
  if (rows.slab >= request.slab_bytes.size()) {
    refuse(at(i) + " names slab " + std::to_string(rows.slab) + " of " + std::to_string(request.slab_bytes.size()));
  }
  if (plus(rows.at, rows.bytes) > request.slab_bytes[rows.slab]) {
    refuse(at(i) + " lies at bytes " + std::to_string(rows.at) + " to " + std::to_string(rows.at + rows.bytes) +
           " of a slab of " + std::to_string(request.slab_bytes[rows.slab]));
  }
  if (rows.layout >= last.size()) {
    refuse(at(i) + " names layout " + std::to_string(rows.layout) + " of " + std::to_string(last.size()));
  }
  if (rows.lo < 0 || rows.hi < rows.lo || rows.stored < rows.hi) {
    refuse(at(i) + " takes rows " + std::to_string(rows.lo) + " to " + std::to_string(rows.hi) + " of " +
           std::to_string(rows.stored));
  }
  if (rows.place < next) refuse(at(i) + " goes before the end of the one in front of it");
  if (rows.place > request.rows || rows.hi - rows.lo > request.rows - rows.place) {
    refuse("the table is longer than the output: " + at(i) + " ends at row " +
           std::to_string(plus(static_cast<std::uint64_t>(rows.place), static_cast<std::uint64_t>(rows.hi - rows.lo))) +
           " of " + std::to_string(request.rows));
  }
  Piece piece = {};
  piece.stride = times(static_cast<std::uint64_t>(rows.stored), request.row_bytes);
  if (plus(last[rows.layout], times(piece.stride, request.heads)) > rows.bytes) {
    refuse(at(i) + " has a tensor that ends behind its image");
  }
  piece.slab = rows.slab;
  piece.layout = rows.layout;
  piece.from = rows.at + static_cast<std::uint64_t>(rows.lo) * request.row_bytes;
  piece.length = static_cast<std::uint64_t>(rows.hi - rows.lo) * request.row_bytes;
  piece.to = times(static_cast<std::uint64_t>(rows.place), request.row_bytes);
  return piece;
}

std::vector<Piece> check_pieces(const KernelRequest& request) {
  const auto last = last_offsets(request);
  std::vector<Piece> pieces;
  std::int64_t next = 0;
  for (std::size_t i = 0; i < request.pieces.size(); ++i) {
    const Piece piece = check_piece(request, last, i, next);
    next = request.pieces[i].place + (request.pieces[i].hi - request.pieces[i].lo);
    if (piece.length > 0) pieces.push_back(piece);
  }
  return pieces;
}

int widest_unit(const KernelRequest& request, const std::vector<Piece>& pieces) {
  // The lowest bit that is set anywhere is the widest power of two that divides everything.
  std::uint64_t bits = times(static_cast<std::uint64_t>(request.capacity), request.row_bytes);
  if (request.clear_spare) bits |= static_cast<std::uint64_t>(request.rows) * request.row_bytes;
  for (const auto& tensor : request.tensors) {
    for (const std::uint64_t offset : tensor.offsets) bits |= offset;
  }
  for (const auto& piece : pieces) bits |= piece.from | piece.stride | piece.length | piece.to;
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1;
}

// Spare rows, in pieces no longer than the longest copied one: a group more for each would go to waste elsewhere.
void add_cleared(const KernelRequest& request, std::uint64_t longest, std::vector<Piece>& pieces) {
  std::uint64_t to = static_cast<std::uint64_t>(request.rows) * request.row_bytes;
  const std::uint64_t end = static_cast<std::uint64_t>(request.capacity) * request.row_bytes;
  for (; to < end; to += std::min(longest, end - to)) {
    pieces.push_back({kClearedSlab, 0, 0, 0, std::min(longest, end - to), to});
  }
}

}  // namespace

KernelTable make_kernel_table(const KernelRequest& request, std::optional<KernelTile> tile) {
  check_outputs(request);
  auto pieces = check_pieces(request);
  KernelTable table;
  table.unit_bytes = widest_unit(request, pieces);
  table.tile = tile.value_or(tile_for(table.unit_bytes));
  const auto unit = static_cast<std::uint64_t>(table.unit_bytes);
  const auto tile_bytes = static_cast<std::uint64_t>(table.tile.units()) * unit;
  const std::uint64_t out_bytes = static_cast<std::uint64_t>(request.capacity) * request.row_bytes;
  times(times(out_bytes, request.heads), request.tensors.size());
  // Before spare rows become pieces: nobody's capacity may fill the memory with them.
  if (out_bytes / unit > kMostUnits) refuse("too much for one launch");
  std::uint64_t longest = tile_bytes;
  for (const auto& piece : pieces) longest = std::max(longest, piece.length);
  if (request.clear_spare) add_cleared(request, longest, pieces);

  const std::uint64_t tiles = (longest + tile_bytes - 1) / tile_bytes;
  table.groups = times(tiles, pieces.size());
  if (times(table.groups, static_cast<std::uint64_t>(table.tile.units())) > kMostUnits)
    refuse("too much for one launch");

  const std::size_t layouts = request.tensors.front().offsets.size();
  table.words = {tiles, out_bytes / unit, request.tensors.size(), 0};
  table.words.reserve(kHeaderWords + kPieceWords * pieces.size() + layouts * request.tensors.size() +
                      kLeastTensorWords);
  for (const auto& piece : pieces) {
    const std::uint64_t from = piece.from / unit;
    if (from >> kSlabShift != 0) refuse("sizes that cannot be addressed");
    table.words.insert(table.words.end(), {piece.slab << kSlabShift | from, piece.stride / unit,
                                           piece.layout << kLayoutShift | piece.length / unit, piece.to / unit});
  }
  table.tensors_at = table.words.size();
  for (std::size_t layout = 0; layout < layouts; ++layout) {
    for (const auto& tensor : request.tensors) table.words.push_back(tensor.offsets[layout] / unit);
  }
  table.words.resize(table.words.size() + kLeastTensorWords - 1);
  return table;
}

}  // namespace prefixcache::gather
