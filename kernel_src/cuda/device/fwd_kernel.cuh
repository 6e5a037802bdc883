// Bulk forward, as tiles (kTokens rows of kThreads * kLanes channels, register window, no state)
// and head items (one sequence's first W-1 outputs and its final state). Head items are long code
// that takes registers from tiles: only the common dense kernel has both, where a second launch
// would show beside small inputs.
//
// Only head items touch states, and a thread reads its channels' initial columns before it writes
// their final ones, so the final state may be the initial state's storage in any block order.
#pragma once

#include "math.cuh"
#include "segments.cuh"
#include "state_row.cuh"

namespace short_conv::cuda {

// How blocks map to work. x counts channel blocks, so that neighbours read neighbouring memory. z
// is the batch row and y its head item, which is slow and would be a tail, then its tiles. That
// spares each block a division before its first load (1.10 against 1.01 of a copy at [4, 4096,
// 12288]). Flat, where a row or the batch is too long for that: y, carried on by z, counts all
// rows' items.
struct FwdGrid {
  uint32_t items_per_row;  // of one batch row
  bool heads;              // the first item is a head item
  bool flat;
  bool plain;       // no initial state and no slots: dense tiles need no mask
  bool state_rows;  // whole rows [D, W] of x's dtype, so that head items move them by vectors
};

enum class Packing { kDense, kPacked, kAny };

// Rows of a whole tile from registers to y.
template <typename Io, int kWidth, bool kExact, int kTokens>
__device__ void fwd_rows(const Taps<Io, kWidth, kExact>& taps, Window<Io, kWidth>& window,
                         const typename Io::Raw (&raw)[kTokens], bool silu, typename Io::x_t* y,
                         int64_t stride) {
#pragma unroll
  for (int j = 0; j < kTokens; ++j, y += stride) {
    typename Io::Unit in[Io::kUnits], out[Io::kUnits];
    Io::unpack(raw[j], in);
    window.template step<true>(taps, in, silu, out);
    Io::store(y, out);
  }
}

// The same where some row is outside T, restarts the window, is padding, or a head item's.
template <typename Io, int kWidth, bool kExact, int kTokens>
__device__ void fwd_masked_rows(const Taps<Io, kWidth, kExact>& taps, Window<Io, kWidth>& window,
                                const typename Io::Raw (&raw)[kTokens], const TileMask& mask,
                                bool silu, typename Io::x_t* y, int64_t stride) {
#pragma unroll
  for (int j = 0; j < kTokens; ++j, y += stride) {
    if (j >= mask.rows) return;
    if (mask.starts >> j & 1) window.clear();
    typename Io::Unit in[Io::kUnits], out[Io::kUnits];
    Io::unpack(raw[j], in);
    window.step(taps, in, silu, out);
    if (mask.zeros >> j & 1) {
#pragma unroll
      for (int i = 0; i < Io::kLanes; ++i) lane(out, i) = 0.0f;
    }
    if (!(mask.heads >> j & 1)) Io::store(y, out);
  }
}

template <typename Io, int kWidth, bool kExact, int kTokens, Packing kPacking>
__device__ void fwd_tile(const FwdGrid& grid, const FwdParams& p, int64_t b, int64_t t0,
                         int64_t c) {
  using x_t = typename Io::x_t;
  const int64_t stride = p.x.stride_t;
  const x_t* x =
      static_cast<const x_t*>(p.x.ptr) + b * p.x.stride_b + t0 * stride + c * p.x.stride_d;
  const int rows = static_cast<int>(p.T - t0 < kTokens ? p.T - t0 : kTokens);
  const int behind = static_cast<int>(t0 < p.W - 1 ? t0 : p.W - 1);

  // All loads leave before the first is needed; the sequence lookup hides behind them. History
  // rows are read wherever they exist and dropped below if they are another sequence's.
  typename Io::Raw raw[kTokens], before[kWidth - 1]{};
  const x_t* row = x;
  if (rows == kTokens) {
#pragma unroll
    for (int j = 0; j < kTokens; ++j, row += stride) raw[j] = Io::load(row);
  } else {
#pragma unroll
    for (int j = 0; j < kTokens; ++j, row += stride)
      if (j < rows) raw[j] = Io::load(row);
  }
  row = x - stride;
#pragma unroll
  for (int k = 0; k < kWidth - 1; ++k, row -= stride)
    if (k < behind) before[k] = Io::load(row);
  const Taps<Io, kWidth, kExact> taps(p.weight, p.bias, p.W, p.silu, c);

  const bool dense = kPacking == Packing::kDense ||
                     (kPacking == Packing::kAny && !p.cu_seqlens.ptr && !p.seq_idx.ptr);
  const TileMask mask = dense              ? dense_mask(p, grid.plain, b, t0, rows, behind)
                        : p.cu_seqlens.ptr ? cu_seqlens_mask<true>(p, t0, rows)
                                           : warp_seq_idx_mask(p, b, t0, rows);
  Window<Io, kWidth> window;
  window.clear();
#pragma unroll
  for (int k = 0; k < kWidth - 1; ++k)
    if (k < mask.history) Io::unpack(before[k], window.row[kWidth - 2 - k]);

  x_t* y = static_cast<x_t*>(p.y.ptr) + b * p.y.stride_b + t0 * p.y.stride_t + c * p.y.stride_d;
  if (rows < kTokens || (mask.starts | mask.zeros | mask.heads)) {
    fwd_masked_rows(taps, window, raw, mask, p.silu, y, p.y.stride_t);
  } else {
    fwd_rows(taps, window, raw, p.silu, y, p.y.stride_t);
  }
}

// A head item whose states are whole contiguous rows [D, W]: 16 bytes a thread each way.
template <typename Io, int kWidth>
__device__ void fwd_head_rows(const FwdParams& p, int64_t b, int64_t slot, int64_t c, Span first,
                              Span last, bool has_initial) {
  using x_t = typename Io::x_t;
  constexpr int kLanes = Io::kLanes;
  const x_t* x = static_cast<const x_t*>(p.x.ptr) + b * p.x.stride_b + c;
  const bool outputs = p.initial.ptr && p.y.ptr;

  // Loads leave together: a sequence costs two memory latencies, not one a row.
  typename Io::Raw head[kWidth - 1], tail[kWidth];
  StateRow<x_t, kLanes, kWidth> row{};
#pragma unroll
  for (int k = 0; k < kWidth - 1; ++k)
    if (outputs && first.start + k < first.end)
      head[k] = Io::load(x + (first.start + k) * p.x.stride_t);
#pragma unroll
  for (int j = 0; j < kWidth; ++j)
    if (p.final.ptr && last.end - kWidth + j >= last.start)
      tail[j] = Io::load(x + (last.end - kWidth + j) * p.x.stride_t);
  if (has_initial)
    row.load(static_cast<const x_t*>(p.initial.ptr) + slot * p.initial.stride_n + c * kWidth);
  if (outputs) {
    x_t* y = static_cast<x_t*>(p.y.ptr) + b * p.y.stride_b + c;
    const Taps<Io, kWidth, true> taps(p.weight, p.bias, p.W, p.silu, c);
    Window<Io, kWidth> window;
#pragma unroll
    for (int k = 1; k < kWidth; ++k)
#pragma unroll
      for (int i = 0; i < kLanes; ++i)
        lane(window.row[kWidth - 1 - k], i) = to_float(row(i, kWidth - k));
#pragma unroll
    for (int k = 0; k < kWidth - 1; ++k) {
      const int64_t t = first.start + k;
      if (t >= first.end) break;
      if (p.seq_idx.ptr && SeqIdx(p, b).id(t) != SeqIdx(p, b).id(first.start)) continue;
      typename Io::Unit in[Io::kUnits], out[Io::kUnits];
      Io::unpack(head[k], in);
      window.step(taps, in, p.silu, out);
      Io::store(y + t * p.y.stride_t, out);
    }
  }
  if (!p.final.ptr) return;
  const bool carries = last.start == first.start;
  const int length = static_cast<int>(clamp(last.end - last.start, 0, kWidth));
  // Columns move left by length one step at a time, so that no register is indexed at run time.
#pragma unroll
  for (int step = 0; step < kWidth; ++step)
    if (step < length || !carries) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
#pragma unroll
        for (int k = 0; k < kWidth - 1; ++k) row(i, k) = row(i, k + 1);
        row(i, kWidth - 1) = from_float<x_t>(0.0f);
      }
    }
#pragma unroll
  for (int j = 0; j < kWidth; ++j)
    if (j >= kWidth - length) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) row(i, j) = reinterpret_cast<const x_t*>(&tail[j])[i];
    }
  row.store(static_cast<x_t*>(p.final.ptr) + slot * p.final.stride_n + c * kWidth);
}

template <typename Io, int kWidth, bool kExact>
__device__ void fwd_head(const FwdParams& p, bool state_rows, int64_t n, int64_t c) {
  using x_t = typename Io::x_t;
  const State& any = p.initial.ptr ? p.initial : p.final;
  const int64_t slot = slot_of(p.slots, any.count, n);
  if (slot < 0) return;
  const int64_t b = p.cu_seqlens.ptr ? 0 : n;

  // first: the rows that follow the initial state. last: the rows whose end is the final state.
  const SeqIdx seq_idx(p, b);
  Span first{0, p.T};
  if (p.cu_seqlens.ptr) first = sequence_span(p.cu_seqlens, n, p.T);
  if (p.seq_idx.ptr) first = seq_idx.live();
  Span last = first;
  if (p.seq_idx.ptr && first.start < first.end)
    last.start = seq_idx.run_start(first.start, first.end, p.final.len);
  const bool carries = last.start == first.start;  // the initial state reaches the final one

  const x_t* x = static_cast<const x_t*>(p.x.ptr) + b * p.x.stride_b + c * p.x.stride_d;
  const int64_t initial = slot * p.initial.stride_n + c * p.initial.stride_d;
  const int64_t final = slot * p.final.stride_n + c * p.final.stride_d;
  const bool has_initial =
      p.initial.ptr && (!p.has_initial || p.has_initial[n * p.has_initial_stride]);
  if constexpr (Io::kLanes > 1 && kExact)
    if (state_rows) {
      fwd_head_rows<Io, kWidth>(p, b, slot, c, first, last, has_initial);
      return;
    }
  auto history = [&](int64_t column, int i) {
    return load_as_float(p.initial.ptr,
                         initial + i * p.initial.stride_d + column * p.initial.stride_l,
                         p.initial.dtype);
  };

  if (p.initial.ptr && p.y.ptr) {
    x_t* y = static_cast<x_t*>(p.y.ptr) + b * p.y.stride_b + c * p.y.stride_d;
    const Taps<Io, kWidth, kExact> taps(p.weight, p.bias, p.W, p.silu, c);
    Window<Io, kWidth> window;
    window.clear();
    if (has_initial) {
#pragma unroll
      for (int k = 1; k < kWidth; ++k)
        if (kExact || k < p.W)
#pragma unroll
          for (int i = 0; i < Io::kLanes; ++i)
            lane(window.row[kWidth - 1 - k], i) = history(p.initial.len - k, i);
    }
#pragma unroll
    for (int k = 0; k < kWidth - 1; ++k) {
      const int64_t t = first.start + k;
      if (t >= first.end || k >= p.W - 1) break;
      if (p.seq_idx.ptr && seq_idx.id(t) != seq_idx.id(first.start)) continue;
      typename Io::Unit in[Io::kUnits], out[Io::kUnits];
      Io::unpack(Io::load(x + t * p.x.stride_t), in);
      window.step(taps, in, p.silu, out);
      Io::store(y + t * p.y.stride_t, out);
    }
  }

  if (!p.final.ptr) return;
  // Ascending columns: in place, column j takes column j + length, not yet overwritten.
  for (int64_t j = 0; j < p.final.len; ++j) {
    const int64_t t = last.end - p.final.len + j;
    typename Io::Unit in[Io::kUnits];
#pragma unroll
    for (int i = 0; i < Io::kLanes; ++i) lane(in, i) = 0.0f;
    if (t >= last.start) {
      Io::unpack(Io::load(x + t * p.x.stride_t), in);
    } else if (const int64_t column = p.initial.len + t - last.start;
               has_initial && carries && column >= 0) {
#pragma unroll
      for (int i = 0; i < Io::kLanes; ++i) lane(in, i) = history(column, i);
    }
#pragma unroll
    for (int i = 0; i < Io::kLanes; ++i)
      store_from_float(p.final.ptr, final + i * p.final.stride_d + j * p.final.stride_l,
                       p.final.dtype, lane(in, i));
  }
}

// Blocks of 64 threads that registers must leave room for on a multiprocessor of 65536. Dense tiles
// live by their warps in flight: 64 registers took 1.03 of a copy at [1, 8192, 8192] on an H200, 93
// registers 1.15; for W = 7 80 registers 1.18, 92 registers 1.32. The others get what they need not
// to spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kDenseBlocks = 16, kPackedBlocks = 16, kLongBlocks = 12;
#else
// Untuned: 72 and 80 registers, since with fewer some architectures spill.
constexpr int kDenseBlocks = 14, kPackedBlocks = 12, kLongBlocks = 8;
#endif

template <typename x_t, int kWidth, bool kExact, Packing kPacking>
constexpr int kMinBlocks = !kExact                        ? 4
                           : sizeof(x_t) == 4             ? 8
                           : kWidth > 4                   ? kLongBlocks
                           : kPacking == Packing::kPacked ? kPackedBlocks
                           : std::is_same_v<x_t, __half>  ? 14
                                                          : kDenseBlocks;

// kHeads: of a dense launch that may have the head items too, one a batch row.
template <typename Io, int kWidth, bool kExact, int kThreads, int kTokens, Packing kPacking,
          bool kHeads>
__global__ void __launch_bounds__(kThreads, kMinBlocks<typename Io::x_t, kWidth, kExact, kPacking>)
    fwd_kernel(const __grid_constant__ FwdGrid grid, const __grid_constant__ FwdParams p) {
  int64_t c = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * Io::kLanes;
  uint32_t b = blockIdx.z, item = blockIdx.y;
  if (grid.flat) {
    const uint32_t block = blockIdx.z * gridDim.y + blockIdx.y;
    b = block / grid.items_per_row, item = block % grid.items_per_row;
    if (b >= p.B) return;
  }
  if constexpr (kHeads)
    if (grid.heads && item-- == 0) {
      if (c < p.D) fwd_head<Io, kWidth, kExact>(p, grid.state_rows, b, c);
      return;
    }
  // Lookups want whole warps: threads past the last channel do it again, and write the same.
  c = c < p.D ? c : p.D - Io::kLanes;
  fwd_tile<Io, kWidth, kExact, kTokens, kPacking>(grid, p, b, int64_t{item} * kTokens, c);
}

// The head items alone, `sequences` of them a block, one after the other.
template <typename Io, int kWidth, bool kExact, int kThreads>
__global__ void __launch_bounds__(kThreads, 8)
    fwd_head_kernel(const __grid_constant__ FwdParams p, bool state_rows, int sequences) {
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * Io::kLanes;
  const int64_t first = (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * sequences;
  if (c >= p.D) return;
  for (int64_t n = first; n < first + sequences && n < p.N; ++n)
    fwd_head<Io, kWidth, kExact>(p, state_rows, n, c);
}

}  // namespace short_conv::cuda
