// Results that blocks hand to each other through global memory while they run. A word is written
// once; until then it holds kAbsent, which the blocks fill the memory with before all else. The
// word is the message: no flag, no fence. A reader may see one word of a message before another.
#pragma once

#include <cstdint>

#include "async_copy.cuh"
#include "gnsilu/numerics.h"

namespace gnsilu {

constexpr uint64_t kAbsent = ~uint64_t{0};  // a NaN that no arithmetic gives

// Between two looks, in nanoseconds: they need not take what others issue, or load memory.
constexpr unsigned kPause = 40;

__device__ __forceinline__ uint64_t load_word(const uint64_t* from) {
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return word;
}

__device__ __forceinline__ void load_pair(const uint64_t* from, uint64_t (&words)[2]) {
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(words[0]), "=l"(words[1])
               : "l"(from)
               : "memory");
}

__device__ __forceinline__ void store_pair(uint64_t* to, uint64_t first, uint64_t second) {
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second)
               : "memory");
}

// Never kAbsent.
__device__ __forceinline__ uint64_t message(double value) {
  const uint64_t bits = double_bits(value);
  return bits == kAbsent ? bits - 1 : bits;
}

}  // namespace gnsilu
