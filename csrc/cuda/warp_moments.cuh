// The moments of a span, by one warp. In which order elements are added follows from their position
// in the span alone. It is cut into blocks of 128 vectors (1024 elements): lane l owns vectors l,
// l + 32, l + 64 and l + 96 of a block, one chunk. What is left after the last whole block is one
// more block: 64 vectors are chunks of two, 32 of one; then come single vectors, and the elements
// after the last whole one, a lane each. Block b belongs to chain b % 8. A lane adds the chunks of
// each chain in ascending order, then its chains; the lanes are added as a tree. Eight warps may
// share a span, a chain each (ring.cu).
#pragma once

#include "gnsilu/moments.h"
#include "warp_statistics.cuh"

namespace gnsilu {

constexpr uint32_t kChunkVectors = kChunk / kVector;
constexpr uint32_t kBlockVectors = kWarp * kChunkVectors;
constexpr uint32_t kSpanChains = 8;
constexpr uint32_t kChainStride = kSpanChains * kBlockVectors;  // from block to block of a chain

// What x is multiplied by before it is summed: nothing, or a power of two.
struct Unscaled {
  __device__ __forceinline__ float operator()(float x) const { return x; }
};
struct Scaled {
  float scale;
  __device__ __forceinline__ float operator()(float x) const { return mul_rn(x, scale); }
};

// Sums a chain of a span as it comes in; all state of one lane.
template <DType kX, class Scale>
struct ChainReader {
  Scale scale;
  double pivot;
  ChunkSums chunks;

  // again(k): the k-th vector once more, for a sum that needs FP64.
  template <uint32_t kVectors, class Again>
  __device__ __forceinline__ void add(const Vector (&loaded)[kVectors], Again again) {
    float values[kVectors * kVector];
#pragma unroll
    for (uint32_t k = 0; k < kVectors; ++k) {
      float eight[kVector];
      unpack(loaded[k], eight);
#pragma unroll
      for (int i = 0; i < kVector; ++i) values[kVector * k + i] = eight[i];
    }
    chunks.add(values, pivot, [&] {
      double sum = 0;
#pragma unroll 1
      for (uint32_t k = 0; k < kVectors; ++k) {
        float eight[kVector];
        unpack(again(k), eight);
        sum += exact_sum<ExactSum>(eight);
      }
      return sum;
    });
  }

  __device__ __forceinline__ void add(float value) {
    const float one[1] = {value};
    chunks.add(one, pivot, [&] { return exact_sum<ExactSum>(one); });
  }

  __device__ __forceinline__ void unpack(const Vector& vector, float (&values)[kVector]) const {
    vector.template unpack<kX>(values);
#pragma unroll
    for (float& value : values) value = scale(value);
  }

  // kBlocks blocks of the chain, or one of 32 * kVectors vectors, all loaded before the first is
  // used.
  template <uint32_t kVectors, uint32_t kBlocks, class Load>
  __device__ __forceinline__ void read(uint32_t block, Load load) {
    const uint32_t first = block + threadIdx.x % kWarp;
    Vector loaded[kBlocks][kVectors];
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (uint32_t k = 0; k < kVectors; ++k) {
        loaded[b][k] = load(first + kChainStride * b + kWarp * k);
      }
    }
#pragma unroll
    for (uint32_t b = 0; b < kBlocks; ++b) {
      add(loaded[b], [&](uint32_t k) { return load(first + kChainStride * b + kWarp * k); });
    }
  }

  // The chain whose first block begins at vector `block`, below `vectors`.
  template <uint32_t kInFlight, class Load>
  __device__ __forceinline__ void read_chain(uint32_t block, uint32_t vectors, Load load) {
    constexpr uint32_t kBlocks = kInFlight / kChunkVectors;
    constexpr uint32_t kAtOnce = kChainStride * (kBlocks - 1) + kBlockVectors;
    for (; block + kAtOnce <= vectors; block += kChainStride * kBlocks) {
      read<kChunkVectors, kBlocks>(block, load);
    }
    if (kBlocks > 1) {
      for (; block + kBlockVectors <= vectors; block += kChainStride) {
        read<kChunkVectors, 1>(block, load);
      }
    }
    if (block < vectors) read_last(block, vectors, load);
  }

  // Less than a block.
  template <class Load>
  __device__ __forceinline__ void read_last(uint32_t block, uint32_t vectors, Load load) {
    if (block + 2 * kWarp <= vectors) {
      read<2, 1>(block, load);
      block += 2 * kWarp;
    }
    if (block + kWarp <= vectors) {
      read<1, 1>(block, load);
      block += kWarp;
    }
    const uint32_t left = block + threadIdx.x % kWarp;
    if (left < vectors) {
      const Vector loaded[1] = {load(left)};
      add(loaded, [&](uint32_t) { return load(left); });
    }
  }
};

// Over the lanes of a warp, the same in each.
__device__ __forceinline__ LaneSums warp_sum(const LaneSums& sums) {
  return {warp_sum(sums.sum), warp_sum(sums.squares)};
}

template <DType kX, uint32_t kInFlight, class Scale>
__device__ __forceinline__ SpanMoments read_moments(const uint16_t* x, uint32_t size, Scale scale) {
  static_assert(kInFlight % kChunkVectors == 0, "whole chunks are loaded at once");
  const double inverse_size = 1.0 / static_cast<double>(size);  // while x is on its way
  const double pivot = static_cast<double>(scale(to_float<kX>(x[0])));
  const uint32_t vectors = size / kVector;
  const uint32_t element = kVector * vectors + threadIdx.x % kWarp;
  const int width = access_width(x);
  // The chains that have something; the others would add 0.
  const uint32_t chains = min(kSpanChains, size / (kVector * kBlockVectors) + 1);
  LaneSums total;
#pragma unroll 1
  for (uint32_t chain = 0; chain < chains; ++chain) {
    ChainReader<kX, Scale> reader{scale, pivot, {}};
    const uint32_t first = kBlockVectors * chain;
    if (width == 16) {
      reader.template read_chain<kInFlight>(
          first, vectors, [&](uint32_t v) { return load_aligned(x + kVector * v); });
    } else {
      reader.template read_chain<kChunkVectors>(
          first, vectors, [&](uint32_t v) { return load_vector(x + kVector * v, width); });
    }
    if (chain == vectors / kBlockVectors % kSpanChains && element < size) {
      reader.add(scale(to_float<kX>(x[element])));
    }
    total.add(reader.chunks.sums);
  }
  return moments_of(warp_sum(total), pivot, static_cast<double>(size), inverse_size);
}

// The span again, scaled by its largest magnitude: for values whose squares leave FP32's range,
// and for constants, which are found out on the way. Out of line, since ordinary activations never
// come here.
template <DType kX>
__device__ __noinline__ SpanMoments scaled_moments(const uint16_t* x, uint32_t size) {
  const float first = to_float<kX>(x[0]);
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t vectors = size / kVector;
  float max_abs = 0.f;
  bool constant = fabsf(first) <= kLargestFloat;
  const auto visit = [&](float value) {
    max_abs = fmaxf(max_abs, fabsf(value));
    constant &= value == first;
  };
  for_each_vector<2 * kChunkVectors>(x, vectors, lane, kWarp, [&](const Vector& vector, uint32_t) {
    float values[kVector];
    vector.unpack<kX>(values);
#pragma unroll
    for (int i = 0; i < kVector; ++i) visit(values[i]);
  });
  const uint32_t element = kVector * vectors + lane;
  if (element < size) visit(to_float<kX>(x[element]));
  if (__all_sync(0xffffffffu, constant)) return {static_cast<double>(first) + 0.0, 0};  // no -0
  const int exponent = scaling_exponent(warp_max(max_abs));
  const SpanMoments scaled =
      read_moments<kX, 2 * kChunkVectors>(x, size, Scaled{power_of_two(-exponent)});
  return unscaled(scaled, exponent);
}

// The moments as they are to be: those that were found, unless FP32 was too narrow for them.
template <DType kX>
__device__ __forceinline__ SpanMoments checked(const SpanMoments& found, const uint16_t* x,
                                               uint32_t size) {
  if (!needs_scaling(found)) return found;
  if (is_constant(found, kX)) return {found.mean + 0.0, 0};  // no -0
  return scaled_moments<kX>(x, size);
}

// The moments of the span, the same in every lane; kInFlight vectors a lane are loaded at once.
template <DType kX, uint32_t kInFlight>
__device__ __forceinline__ SpanMoments warp_moments(const uint16_t* x, uint32_t size) {
  return checked<kX>(read_moments<kX, kInFlight>(x, size, Unscaled()), x, size);
}

// Over the lanes of a warp, the same in each: origin is the first span's mean.
__device__ __forceinline__ GroupMoments merged(const SpanSums& lane_sums, double origin,
                                               double inverse_group_size) {
  return group_moments({warp_sum(lane_sums.deviations), warp_sum(lane_sums.squares)}, origin,
                       inverse_group_size);
}

// A group's moments from those of its spans, by one warp, the same in every lane.
__device__ __forceinline__ GroupMoments merge_moments(const SpanMoments* spans, int count,
                                                      uint32_t span_size, int64_t group_size,
                                                      double inverse_group_size) {
  const double origin = spans[0].mean;
  const double last_size =
      static_cast<double>(group_size - static_cast<int64_t>(count - 1) * span_size);
  SpanSums sums;
#pragma unroll 4
  for (int i = threadIdx.x % kWarp; i < count; i += kWarp) {
    sums.add(spans[i], i < count - 1 ? static_cast<double>(span_size) : last_size, origin);
  }
  return merged(sums, origin, inverse_group_size);
}

}  // namespace gnsilu
