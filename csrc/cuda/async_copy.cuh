// Copies between global and shared memory that no register waits for. From compute capability 8.0
// on by the vector; from 9.0 on in bulk, with barriers that count them. Instructions as in the PTX
// ISA, chapters cp.async, cp.async.bulk and mbarrier.
#pragma once

#include <cstdint>

namespace gnsilu {

// Nobody asks more often: an error of ours, or a GPU that stopped half of the grid, then ends the
// launch with an error instead of hanging the GPU. A look takes 30 ns (H200, a barrier) to 1 us
// (global memory): half a minute and more.
constexpr uint32_t kMostLooks = 1u << 30;

__device__ __forceinline__ void count_look(uint32_t& looks) {
  if (++looks == kMostLooks) __trap();
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes, both addresses aligned to them; then until all that this thread began are there.
__device__ __forceinline__ void copy_vector(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
}
__device__ __forceinline__ void wait_for_vectors() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// A barrier in shared memory. Its phase ends when `count` arrivals and all announced bytes came;
// a waiter names the parity of the phase, 0 for the first, and must be neither two phases behind
// nor one ahead.
struct Barrier {
  uint64_t state;

  __device__ __forceinline__ void init(uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(count)
                 : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  __device__ __forceinline__ void arrive(uint32_t count) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
                 "r"(count)
                 : "memory");
  }
  __device__ __forceinline__ void arrive_expecting(uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
  }
  // Waits some 50 clocks (H200), no longer.
  __device__ __forceinline__ bool has_ended(uint32_t parity) {
    uint32_t ended;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(ended)
        : "r"(shared_address(this)), "r"(parity)
        : "memory");
    return ended;
  }
  __device__ __forceinline__ void wait(uint32_t parity) {
    for (uint32_t looks = 0; !has_ended(parity);) count_look(looks);
  }
};

// After init(), before other threads or copies use the barriers.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Addresses and sizes are multiples of 16 bytes. `arrived` counts the bytes.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes,
                                          Barrier* arrived) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(arrived))
      : "memory");
}

}  // namespace gnsilu
