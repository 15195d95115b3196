// gather_blocks.h: the gather kernel's one body, for Metal, for CUDA and, in the tests, for plain C++.
//
// A wrapper (gather_blocks.metal, gather_blocks.cu) says in a few macros how a device writes things, and includes this:
//   GATHER_FUNCTION              what a function's declaration begins with
//   GATHER_IN(T), GATHER_OUT(T)  pointers into device memory, to read and to write
//   GATHER_AS_IN(T, p), GATHER_AS_OUT(T, p)   the same pointer, to units of T
//   GATHER_LOAD(p), GATHER_STORE(p, value)    bytes that are used once
//   GATHER_ZERO                  a unit of zeros
//   GATHER_UNROLL                what makes the compiler unroll the next loop
// The host says, in front of it all: GATHER_UNIT_BYTES (16, 4 or 1), GATHER_LANES (threads of a group), GATHER_LOADS
// (units a thread copies at once). README.md tells what the table holds; the host has checked it.

#if GATHER_UNIT_BYTES == 16
typedef uint4 GatherUnit;
#elif GATHER_UNIT_BYTES == 4
typedef uint32_t GatherUnit;
#else
typedef uint8_t GatherUnit;
#endif

#define GATHER_TILE_UNITS (GATHER_LANES * GATHER_LOADS)
#define GATHER_HEADER_WORDS 4
#define GATHER_PIECE_WORDS 4
#define GATHER_SLAB_SHIFT 56
#define GATHER_LAYOUT_SHIFT 32
#define GATHER_CLEARED 255

// What one group copies: units [at, end) of a piece, from one slab to one head of one output.
struct GatherTile {
  uint32_t slab;
  uint64_t from;
  uint64_t to;
  uint32_t at;
  uint32_t end;
};

GATHER_FUNCTION GatherTile gather_tile(GATHER_IN(uint64_t) table, GATHER_IN(uint64_t) tensors, uint32_t output,
                                       uint32_t group, uint32_t head) {
  const uint32_t tiles = uint32_t(table[0]);
  const uint32_t piece = group / tiles;
  GATHER_IN(uint64_t) words = table + (GATHER_HEADER_WORDS + piece * GATHER_PIECE_WORDS);
  const uint64_t from = words[0];
  const uint64_t size = words[2];
  const uint64_t tensor = tensors[output + uint32_t(size >> GATHER_LAYOUT_SHIFT) * uint32_t(table[2])];
  GatherTile tile;
  tile.slab = uint32_t(from >> GATHER_SLAB_SHIFT);
  tile.from = (from & ((uint64_t(1) << GATHER_SLAB_SHIFT) - 1)) + tensor + head * words[1];
  tile.to = words[3] + head * table[1];
  tile.at = (group - piece * tiles) * GATHER_TILE_UNITS;
  tile.end = uint32_t(size);
  return tile;
}

GATHER_FUNCTION void gather_copy(GatherTile tile, GATHER_IN(GatherUnit) arena, GATHER_OUT(GatherUnit) out,
                                 uint32_t lane) {
  if (tile.at >= tile.end) return;
  const uint32_t at = tile.at + lane;
  GATHER_OUT(GatherUnit) to = out + tile.to;
  if (tile.slab == GATHER_CLEARED) {
    for (uint32_t i = 0; i < GATHER_LOADS; ++i) {
      const uint32_t unit = at + i * GATHER_LANES;
      if (unit < tile.end) GATHER_STORE(to + unit, GATHER_ZERO);
    }
    return;
  }
  GATHER_IN(GatherUnit) from = arena + tile.from;
  if (tile.end - tile.at >= GATHER_TILE_UNITS) {
    // All loads are on their way before the first store waits for one.
    GatherUnit held[GATHER_LOADS];
    GATHER_UNROLL
    for (uint32_t i = 0; i < GATHER_LOADS; ++i) held[i] = GATHER_LOAD(from + (at + i * GATHER_LANES));
    GATHER_UNROLL
    for (uint32_t i = 0; i < GATHER_LOADS; ++i) GATHER_STORE(to + (at + i * GATHER_LANES), held[i]);
    return;
  }
  for (uint32_t i = 0; i < GATHER_LOADS; ++i) {
    const uint32_t unit = at + i * GATHER_LANES;
    if (unit < tile.end) GATHER_STORE(to + unit, GATHER_LOAD(from + unit));
  }
}

// The kernel is a list of these, written by the host for its number of slabs and outputs: begin, one line a slab, one
// line an output, end. `position` and `thread` are the device's names for the group's and the thread's place.
#define GATHER_BEGIN(table, tensors, position)                                                           \
  const uint32_t gather_output = position.z;                                                             \
  const GatherTile tile = gather_tile(table, tensors, gather_output, position.x, position.y);
#define GATHER_ARENA(arena0) GATHER_IN(GatherUnit) arena = GATHER_AS_IN(GatherUnit, arena0);
#define GATHER_OR_ARENA(i, arena_i) if (tile.slab == i) arena = GATHER_AS_IN(GatherUnit, arena_i);
#define GATHER_OUTPUT(out0) GATHER_OUT(GatherUnit) out = GATHER_AS_OUT(GatherUnit, out0);
#define GATHER_OR_OUTPUT(i, out_i) if (gather_output == i) out = GATHER_AS_OUT(GatherUnit, out_i);
#define GATHER_END(thread) gather_copy(tile, arena, out, thread.x);
