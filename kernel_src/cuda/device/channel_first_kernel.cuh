// Bulk forward of [B, D, T] memory: unit stride along T, as Mamba code passes it. A thread takes
// kElems neighbouring rows of one channel, 16 bytes, so that a warp reads 512 contiguous bytes,
// then those a block's width further on. States are the head items' business (fwd_kernel.cuh),
// launched apart.
#pragma once

#include "../launch/config.h"
#include "math.cuh"
#include "segments.cuh"

namespace short_conv::cuda {

template <typename x_t, int kWidth, bool kExact>
struct RowSpan {
  static constexpr int kElems = 16 / sizeof(x_t);
  static constexpr int kBefore = kWidth <= 5 ? 4 : 8;  // rows of history, in whole accesses
  using Vec = VecIo<x_t>;
  using Before = VecIo<x_t, kBefore * sizeof(x_t) < 16 ? kBefore * sizeof(x_t) : 16>;
  static constexpr int kAccesses = kBefore / Before::kLanes;

  typename Vec::Raw raw;
  typename Before::Raw before[kAccesses];

  // Rows t0 - kBefore .. t0 + kElems - 1 of [0, T).
  __device__ void load(const x_t* x, int64_t t0) {
    raw = Vec::load(x + t0);
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      const int64_t t = t0 - kBefore + i * Before::kLanes;
      before[i] = t >= 0 ? Before::load(x + t) : typename Before::Raw{};
    }
  }

  __device__ void unpack(float (&v)[kBefore + kElems]) const {
    typename Vec::Unit unit[Vec::kUnits];
    Vec::unpack(raw, unit);
#pragma unroll
    for (int e = 0; e < kElems; ++e) v[kBefore + e] = lane(unit, e);
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      typename Before::Unit old[Before::kUnits];
      Before::unpack(before[i], old);
#pragma unroll
      for (int e = 0; e < Before::kLanes; ++e) v[i * Before::kLanes + e] = lane(old, e);
    }
  }
};

// Output j of a span, of whose history only the last `age` rows are its own sequence's.
template <bool kMasked, int kBefore, typename x_t, int kWidth, bool kExact, int kRows>
__device__ float span_output(const Taps<StridedIo<x_t>, kWidth, kExact>& taps,
                             const float (&v)[kRows], int j, int age, bool activate) {
  float acc = taps.bias[0];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const int back = kWidth - 1 - k;
    if (kExact || k >= taps.first)
      acc = fmaf(taps.w[k][0], !kMasked || back <= age ? v[kBefore + j - back] : 0.0f, acc);
  }
  return choose(activate, silu<x_t>(acc), acc);
}

// A span that states, slots or packing may reach into: row by row.
template <typename x_t, int kWidth, bool kExact>
__device__ void masked_span(const FwdParams& p, const RowSpan<x_t, kWidth, kExact>& span,
                            const Taps<StridedIo<x_t>, kWidth, kExact>& taps, int64_t b, int64_t t0,
                            x_t* y) {
  using Span = RowSpan<x_t, kWidth, kExact>;
  constexpr int kElems = Span::kElems, kBefore = Span::kBefore;
  const int behind = static_cast<int>(t0 < p.W - 1 ? t0 : p.W - 1);
  const TileMask mask = p.cu_seqlens.ptr ? cu_seqlens_mask<false>(p, t0, kElems)
                        : p.seq_idx.ptr  ? seq_idx_mask(p, b, t0, kElems)
                                         : dense_mask(p, false, b, t0, kElems, behind);
  float v[kBefore + kElems];
  span.unpack(v);
  int age = mask.history;
#pragma unroll
  for (int j = 0; j < kElems; ++j) {
    if (mask.starts >> j & 1) age = 0;
    const bool zero = mask.zeros >> j & 1;
    const float result = zero ? 0.0f : span_output<true, kBefore>(taps, v, j, age, p.silu);
    if (zero || !(mask.heads >> j & 1)) y[t0 + j] = from_float<x_t>(result);
    ++age;
  }
}

template <typename x_t, int kWidth, bool kExact>
__device__ void plain_span(const FwdParams& p, const RowSpan<x_t, kWidth, kExact>& span,
                           const Taps<StridedIo<x_t>, kWidth, kExact>& taps, x_t* y) {
  using Span = RowSpan<x_t, kWidth, kExact>;
  using Vec = typename Span::Vec;
  float v[Span::kBefore + Span::kElems];
  span.unpack(v);
  typename Vec::Unit out[Vec::kUnits];
#pragma unroll
  for (int j = 0; j < Span::kElems; ++j)
    lane(out, j) = span_output<false, Span::kBefore>(taps, v, j, 0, p.silu);
  Vec::store(y, out);
}

// Blocks: x counts parts of channel_first_rows, y and z channels of batch rows.
template <typename x_t, int kWidth, bool kExact, bool kPlain, int kAhead,
          int kThreads = kChannelFirstThreads, int kSpans = kChannelFirstSpans>
__global__ void __launch_bounds__(kThreads, kPlain ? 65536 / 64 / kThreads : 4)
    channel_first_kernel(const __grid_constant__ FwdParams p) {
  using Span = RowSpan<x_t, kWidth, kExact>;
  constexpr int kStep = kThreads * Span::kElems;
  const int64_t item = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  if (item >= p.B * p.D) return;
  const int64_t b = p.B == 1 ? 0 : item / p.D, c = item - b * p.D;
  const x_t* x = static_cast<const x_t*>(p.x.ptr) + b * p.x.stride_b + c * p.x.stride_d;
  x_t* y = static_cast<x_t*>(p.y.ptr) + b * p.y.stride_b + c * p.y.stride_d;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kSpans * kStep;
  const int64_t end = begin + kSpans * kStep < p.T ? begin + kSpans * kStep : p.T;
  int64_t t = begin + threadIdx.x * Span::kElems;
  Span ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (t + i * kStep < end) ahead[i].load(x, t + i * kStep);
  const Taps<StridedIo<x_t>, kWidth, kExact> taps(p.weight, p.bias, p.W, p.silu, c);
#pragma unroll 1
  for (; t < end; t += kAhead * kStep)
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t t0 = t + i * kStep;
      if (t0 >= end) return;
      const Span span = ahead[i];
      if (t0 + kAhead * kStep < end) ahead[i].load(x, t0 + kAhead * kStep);
      if constexpr (kPlain) {
        plain_span(p, span, taps, y + t0);
      } else {
        masked_span(p, span, taps, b, t0, y);
      }
    }
}

}  // namespace short_conv::cuda
