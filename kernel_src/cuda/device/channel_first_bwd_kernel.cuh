// Backward of [B, D, T] memory without states or packing. A thread takes spans of one channel's
// rows, as the forward does, and works out again the gradients of the few rows behind its own that
// its dx needs: they are in the cache, and no thread waits for another but for the sums.
#pragma once

#include "bwd_kernel.cuh"
#include "channel_first_kernel.cuh"

namespace short_conv::cuda {

// Adds v up over the warp; true for the lane that has the sums. On the host the lanes run in turn,
// and the last one has them.
template <int kCount>
__device__ bool warp_sums(float (&v)[kCount]) {
#ifdef SHORT_CONV_WARPS
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int distance = 16; distance; distance /= 2) v[i] += __shfl_xor_sync(~0u, v[i], distance);
  return threadIdx.x % 32 == 0;
#else
  static thread_local float sums[kCount];
  for (int i = 0; i < kCount; ++i) v[i] = sums[i] = (threadIdx.x % 32 ? sums[i] : 0.0f) + v[i];
  return threadIdx.x % 32 == 31;
#endif
}

// A span of x and dy with kBehind rows more, of which none or all of an access are inside T.
template <typename x_t, int kWidth, bool kExact>
struct GradSpan {
  using Span = RowSpan<x_t, kWidth, kExact>;
  using Near = typename Span::Before;
  static constexpr int kElems = Span::kElems, kBefore = Span::kBefore, kBehind = Span::kBefore;
  static constexpr int kAccesses = Span::kAccesses;

  Span x;
  typename Span::Vec::Raw dy;
  typename Near::Raw x_behind[kAccesses], dy_behind[kAccesses];

  __device__ void load(const x_t* x_row, const x_t* dy_row, int64_t t0, int64_t T) {
    x.load(x_row, t0);
    dy = Span::Vec::load(dy_row + t0);
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      const int64_t t = t0 + kElems + i * Near::kLanes;
      x_behind[i] = t < T ? Near::load(x_row + t) : typename Near::Raw{};
      dy_behind[i] = t < T ? Near::load(dy_row + t) : typename Near::Raw{};
    }
  }

  __device__ void unpack(float (&v)[kBefore + kElems + kBehind],
                         float (&grad)[kElems + kBehind]) const {
    float own[kBefore + kElems];
    x.unpack(own);
#pragma unroll
    for (int e = 0; e < kBefore + kElems; ++e) v[e] = own[e];
    typename Span::Vec::Unit unit[Span::Vec::kUnits];
    Span::Vec::unpack(dy, unit);
#pragma unroll
    for (int e = 0; e < kElems; ++e) grad[e] = lane(unit, e);
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      typename Near::Unit near[Near::kUnits];
      Near::unpack(x_behind[i], near);
#pragma unroll
      for (int e = 0; e < Near::kLanes; ++e)
        v[kBefore + kElems + i * Near::kLanes + e] = lane(near, e);
      Near::unpack(dy_behind[i], near);
#pragma unroll
      for (int e = 0; e < Near::kLanes; ++e) grad[kElems + i * Near::kLanes + e] = lane(near, e);
    }
  }
};

// sums: of dweight's taps and, last, of dbias.
template <typename x_t, int kWidth, bool kExact>
__device__ void span_gradients(const BwdParams& p, const GradSpan<x_t, kWidth, kExact>& span,
                               const Taps<StridedIo<x_t>, kWidth, kExact>& taps, int64_t t0,
                               x_t* dx, float (&sums)[kWidth + 1]) {
  using Span = GradSpan<x_t, kWidth, kExact>;
  using Vec = typename Span::Span::Vec;
  constexpr int kElems = Span::kElems, kBefore = Span::kBefore, kLag = kWidth - 1;
  float v[kBefore + kElems + Span::kBehind], g[kElems + Span::kBehind];
  span.unpack(v, g);
#pragma unroll
  for (int j = 0; j < kElems + kLag; ++j) {
    float z = taps.bias[0];
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      if (kExact || k >= taps.first) z = fmaf(taps.w[k][0], v[kBefore + j - kLag + k], z);
    g[j] = choose(p.silu, through_silu<x_t>(g[j], z), g[j]);
  }
#pragma unroll
  for (int j = 0; j < kElems; ++j) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) sums[k] = fmaf(g[j], v[kBefore + j - kLag + k], sums[k]);
    sums[kWidth] += g[j];
  }
  if (!dx) return;
  // Rows that are not there add nothing, whatever the taps hold.
  const int rows = static_cast<int>(p.T - t0 < kElems + kLag ? p.T - t0 : kElems + kLag);
  typename Vec::Unit out[Vec::kUnits];
#pragma unroll
  for (int j = 0; j < kElems; ++j) {
    float acc = taps.w[kLag][0] * g[j];
#pragma unroll
    for (int k = kLag - 1; k >= 0; --k) {
      const int row = j + kLag - k;
      if ((kExact || k >= taps.first) && (row < kElems || row < rows))
        acc = fmaf(taps.w[k][0], g[row], acc);
    }
    lane(out, j) = acc;
  }
  Vec::store(dx + t0, out);
}

// Blocks as in the forward. Each warp leaves its sums as one part in the workspace.
template <typename x_t, int kWidth, bool kExact, int kThreads = kChannelFirstThreads,
          int kSpans = kChannelFirstSpans>
__global__ void __launch_bounds__(kThreads, kExact ? 5 : 3)
    channel_first_bwd_kernel(const __grid_constant__ BwdParams p) {
  using Span = GradSpan<x_t, kWidth, kExact>;
  constexpr int kStep = kThreads * Span::kElems, kWarps = kThreads / 32;
  const int64_t item = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  if (item >= p.B * p.D) return;
  const int64_t b = p.B == 1 ? 0 : item / p.D, c = item - b * p.D;
  const x_t* x = static_cast<const x_t*>(p.x.ptr) + b * p.x.stride_b + c * p.x.stride_d;
  const x_t* dy = static_cast<const x_t*>(p.dy.ptr) + b * p.dy.stride_b + c * p.dy.stride_d;
  x_t* dx =
      p.dx.ptr ? static_cast<x_t*>(p.dx.ptr) + b * p.dx.stride_b + c * p.dx.stride_d : nullptr;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kSpans * kStep;
  const int64_t end = begin + kSpans * kStep < p.T ? begin + kSpans * kStep : p.T;
  int64_t t = begin + threadIdx.x * Span::kElems;
  Span ahead;
  if (t < end) ahead.load(x, dy, t, p.T);
  const Taps<StridedIo<x_t>, kWidth, kExact> taps(p.weight, p.bias, p.W, false, c);
  float sums[kWidth + 1] = {};
#pragma unroll 1
  for (; t < end; t += kStep) {
    const Span span = ahead;
    if (t + kStep < end) ahead.load(x, dy, t + kStep, p.T);
    span_gradients(p, span, taps, t, dx, sums);
  }
  if (p.parts == 0 || !warp_sums(sums)) return;
  const int64_t part = (b * gridDim.x + blockIdx.x) * kWarps + threadIdx.x / 32;
  float* to = static_cast<float*>(p.workspace) + part * (p.W + 1) * p.D + c;
#pragma unroll
  for (int k = 0; k < kWidth; ++k)
    if (kExact || k >= taps.first) to[(k - taps.first) * p.D] = sums[k];
  to[p.W * p.D] = sums[kWidth];
}

}  // namespace short_conv::cuda
