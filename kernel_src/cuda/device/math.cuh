// The arithmetic that every kernel shares, so that prefill, its continuation and decode give the
// same bits: acc = bias; acc = fma(w[k], x[k], acc) oldest tap first; SiLU in fp32.
#pragma once

#include "tile_io.cuh"

namespace short_conv::cuda {

// The bare instructions: without ftz the compiler wraps each in a rescaling of denormals.
#ifdef __CUDA_ARCH__
// Volatile: not to be moved behind a branch.
__device__ inline float fast_exp2(float v) {
  float r;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
__device__ inline float fast_rcp(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
#else
inline float fast_exp2(float v) { return exp2f(v); }
inline float fast_rcp(float v) { return 1.0f / v; }
#endif

__device__ inline float fma_unit(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline float add_unit(float a, float b) { return a + b; }
__device__ inline float mul_unit(float a, float b) { return a * b; }
__device__ inline float2 add_unit(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
__device__ inline float2 mul_unit(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }

// Two channels at once. Only SM100 and SM103 have a packed FMA; ptxas splits it elsewhere.
__device__ inline float2 fma_unit(float2 a, float2 b, float2 c) {
#if __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1100
  return __ffma2_rn(a, b, c);
#else
  return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)};
#endif
}

// SiLU of acc = tap_scale * a. Three approximate instructions stay far within half an ulp of a
// 16-bit result (tanh.approx would not: it cancels for negative a); fp32 results need the exact
// functions. With s = -log2(e) folded into taps and bias:
// a / (1 + exp(-a)) = s a / (s + s exp2(s a)), which saves one of five instructions an element.
template <typename x_t>
__device__ float silu(float acc) {
  if constexpr (kSiluScale<x_t> == 1.0f) {
    return acc / (1.0f + expf(-acc));
  } else {
    constexpr float s = kSiluScale<x_t>;
    return acc * fast_rcp(fmaf(fast_exp2(acc), s, s));
  }
}

template <typename x_t>
__device__ float2 silu(float2 a) {
  return {silu<x_t>(a.x), silu<x_t>(a.y)};
}

__device__ inline float choose(bool first, float a, float b) { return first ? a : b; }
__device__ inline float2 choose(bool first, float2 a, float2 b) {
  return {first ? a.x : b.x, first ? a.y : b.y};
}

// The last W-1 inputs, oldest first.
template <typename Io, int kWidth>
struct Window {
  static_assert(kWidth >= 2, "W = 1 runs as kWidth = kMaxWidth with right-aligned taps");
  using Unit = typename Io::Unit;

  Unit row[kWidth - 1][Io::kUnits];

  __device__ void clear() {
#pragma unroll
    for (int k = 0; k < kWidth - 1; ++k)
#pragma unroll
      for (int i = 0; i < Io::kLanes; ++i) lane(row[k], i) = 0.0f;
  }

  // Takes the next input in and gives its output. kBranchless: both values exist before the choice,
  // since a branch a row would keep rows from overlapping; it takes more registers.
  template <bool kBranchless = false, bool kExact>
  __device__ void step(const Taps<Io, kWidth, kExact>& taps, const Unit (&x)[Io::kUnits],
                       bool activate, Unit (&y)[Io::kUnits]) {
#pragma unroll
    for (int i = 0; i < Io::kUnits; ++i) {
      Unit acc = taps.bias[i];
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        if (kExact || k >= taps.first)
          acc = fma_unit(taps.w[k][i], k < kWidth - 1 ? row[k][i] : x[i], acc);
      if constexpr (kBranchless) {
        y[i] = choose(activate, silu<typename Io::x_t>(acc), acc);
      } else {
        y[i] = activate ? silu<typename Io::x_t>(acc) : acc;
      }
#pragma unroll
      for (int k = 0; k < kWidth - 2; ++k) row[k][i] = row[k + 1][i];
      row[kWidth - 2][i] = x[i];
    }
  }
};

}  // namespace short_conv::cuda
