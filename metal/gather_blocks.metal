// gather_blocks.metal: how Metal writes what gather_blocks.h is made of.
#include <metal_stdlib>
using namespace metal;

#define GATHER_FUNCTION inline
#define GATHER_UNROLL
#define GATHER_ZERO GatherUnit(0)
// The tests' metal_stdlib brings pointers that check every index; they see the same source otherwise.
#ifndef GATHER_IN
#define GATHER_IN(T) const device T*
#define GATHER_OUT(T) device T*
#define GATHER_AS_IN(T, p) ((const device T*)(p))
#define GATHER_AS_OUT(T, p) ((device T*)(p))
#endif
#define GATHER_LOAD(p) (*(p))
#define GATHER_STORE(p, value) (*(p) = (value))
#include "gather_blocks.h"
