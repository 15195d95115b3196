// gather_blocks.cu: how CUDA writes what gather_blocks.h is made of.
#define GATHER_FUNCTION __device__ inline
#define GATHER_UNROLL _Pragma("unroll")
#define GATHER_ZERO GatherUnit{}
#define GATHER_IN(T) const T*
#define GATHER_OUT(T) T*
#define GATHER_AS_IN(T, p) reinterpret_cast<const T*>(p)
#define GATHER_AS_OUT(T, p) reinterpret_cast<T*>(p)
#ifndef GATHER_LOAD
// Nothing is read or written twice: what is gathered need not push the model's own data out of the cache.
#define GATHER_LOAD(p) __ldcs(p)
#define GATHER_STORE(p, value) __stcs(p, value)
#endif
#include "gather_blocks.h"
