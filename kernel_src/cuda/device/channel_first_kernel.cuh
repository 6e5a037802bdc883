// Bulk forward of [B, D, T] memory: unit stride along T, as Mamba code passes it. A thread takes
// kElems neighbouring rows of one channel, 16 bytes, so that a warp reads 512 contiguous bytes.
// States are the head items' business (fwd_kernel.cuh), launched apart.
#pragma once

#include "math.cuh"
#include "segments.cuh"

namespace short_conv::cuda {

template <typename x_t, int kWidth, bool kExact>
struct RowSpan {
  static constexpr int kElems = 16 / sizeof(x_t);
  static constexpr int kBefore = (kWidth - 2 + kElems) / kElems * kElems;  // whole vectors
  using Vec = VecIo<x_t>;

  float v[kBefore + kElems];

  static constexpr int kVectors = (kBefore + kElems) / kElems;
  using Raw = typename Vec::Raw;

  // Rows t0 - kBefore .. t0 + kElems - 1 of [0, T).
  __device__ static void load(const x_t* x, int64_t t0, int64_t T, Raw (&raw)[kVectors]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int64_t t = t0 - kBefore + i * kElems;
      raw[i] = Raw{};
      if (t >= 0 && t < T) raw[i] = Vec::load(x + t);
    }
  }

  __device__ explicit RowSpan(const Raw (&raw)[kVectors]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      typename Vec::Unit unit[Vec::kUnits];
      Vec::unpack(raw[i], unit);
#pragma unroll
      for (int e = 0; e < kElems; ++e) v[i * kElems + e] = lane(unit, e);
    }
  }

  // Output of row t0 + j, of whose history only the last `age` rows are its own sequence's.
  template <bool kMasked>
  __device__ float output(const Taps<StridedIo<x_t>, kWidth, kExact>& taps, int j, int age,
                          bool silu_follows) const {
    float acc = taps.bias[0];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const int back = kWidth - 1 - k;
      if (kExact || k >= taps.first)
        acc = fmaf(taps.w[k][0], !kMasked || back <= age ? v[kBefore + j - back] : 0.0f, acc);
    }
    return silu_follows ? silu<x_t>(acc) : acc;
  }
};

template <typename x_t, int kWidth, bool kExact, int kThreads, int kSpans>
__global__ void __launch_bounds__(kThreads, 4)
    channel_first_kernel(const __grid_constant__ FwdParams p) {
  using Rows = RowSpan<x_t, kWidth, kExact>;
  using Vec = typename Rows::Vec;
  constexpr int kElems = Rows::kElems, kStep = kThreads * kElems;
  const int64_t item = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  const int64_t t_block = static_cast<int64_t>(blockIdx.x) * kSpans * kStep + threadIdx.x * kElems;
  if (item >= p.B * p.D || t_block >= p.T) return;
  const int64_t b = p.B == 1 ? 0 : item / p.D, c = item - b * p.D;
  const x_t* x = static_cast<const x_t*>(p.x.ptr) + b * p.x.stride_b + c * p.x.stride_d;
  x_t* y = static_cast<x_t*>(p.y.ptr) + b * p.y.stride_b + c * p.y.stride_d;

  typename Rows::Raw raw[kSpans][Rows::kVectors];
#pragma unroll
  for (int s = 0; s < kSpans; ++s) Rows::load(x, t_block + s * kStep, p.T, raw[s]);
  const Taps<StridedIo<x_t>, kWidth, kExact> taps(p.weight, p.bias, p.W, p.silu, c);
  const bool plain = !p.initial.ptr && !p.slots.ptr;

#pragma unroll
  for (int s = 0; s < kSpans; ++s) {
    const int64_t t0 = t_block + s * kStep;
    if (t0 >= p.T) return;
    const Rows rows(raw[s]);
    const int behind = static_cast<int>(t0 < p.W - 1 ? t0 : p.W - 1);
    const TileMask mask = p.cu_seqlens.ptr ? cu_seqlens_mask(p, t0, kElems)
                          : p.seq_idx.ptr  ? seq_idx_mask(p, b, t0, kElems)
                                           : dense_mask(p, plain, b, t0, kElems, behind);
    typename Vec::Unit out[Vec::kUnits];
    if (mask.history == behind && !(mask.starts | mask.zeros | mask.heads)) {
#pragma unroll
      for (int j = 0; j < kElems; ++j)
        lane(out, j) = rows.template output<false>(taps, j, 0, p.silu);
      Vec::store(y + t0, out);
      continue;
    }
    int age = mask.history;
#pragma unroll
    for (int j = 0; j < kElems; ++j) {
      if (mask.starts >> j & 1) age = 0;
      lane(out, j) = mask.zeros >> j & 1 ? 0.0f : rows.template output<true>(taps, j, age, p.silu);
      ++age;
    }
#pragma unroll
    for (int j = 0; j < kElems; ++j)
      if (!(mask.heads >> j & 1) || (mask.zeros >> j & 1))
        y[t0 + j] = from_float<x_t>(lane(out, j));
  }
}

}  // namespace short_conv::cuda
