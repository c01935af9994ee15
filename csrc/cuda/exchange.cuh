// Results that blocks hand to each other through global memory while they run. A word is written
// once; until then it holds kAbsent, which the blocks fill the memory with before all else: behind
// a barrier of the grid the first word is written or looked for. The word is the message: no flag,
// no fence. A reader may see one word of a message before another.
#pragma once

#include <cstdint>

#include "async_copy.cuh"
#include "gnsilu/numerics.h"

namespace gnsilu {

constexpr uint64_t kAbsent = ~uint64_t{0};  // a NaN that no arithmetic gives

// Counters of the blocks that have come to their grid's barrier. Two launches on one counter keep
// apart by themselves where each has a block for every multiprocessor, and one leaves no room there
// for another: since no block ends before it has waited, the next launch's first block comes when
// all of this one have come, and its last when all of this one have ended. Launches of fewer
// blocks, which tests make, take the counters in turn.
constexpr uint32_t kGridBarriers = 64;
static __device__ uint32_t grid_arrivals[kGridBarriers];

// One thread of each block, which comes to the barrier and may go on with other things before it
// waits there. A launch adds 2^31 in all: the last block to come flips the uppermost bit.
struct GridBarrier {
  uint32_t* arrivals;
  uint32_t before;

  // What the block wrote before a barrier of its own is seen by those who have waited.
  static __device__ __forceinline__ GridBarrier arrive(uint32_t number) {
    uint32_t* const arrivals = grid_arrivals + number;
    const uint32_t added = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1;
    __threadfence();
    return {arrivals, atomicAdd(arrivals, added)};
  }
  __device__ __forceinline__ void wait() const {
    uint32_t now = before;
    for (uint32_t looks = 0; ((now ^ before) & 0x80000000u) == 0; count_look(looks)) {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(arrivals) : "memory");
    }
  }
};

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
