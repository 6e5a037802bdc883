// Backward. A thread walks a part of the rows for its channels: x and dy are read once, the
// pre-activation is recomputed, dx leaves W-1 rows behind, and the sums for dweight and dbias stay
// in registers to the part's end. Threads never meet, so every sum has one order.
#pragma once

#include "../launch/config.h"
#include "math.cuh"
#include "segments.cuh"

namespace short_conv::cuda {

template <typename x_t, int kWidth, bool kExact>
constexpr bool kBwdCommon = kExact && kWidth <= 4 && sizeof(x_t) == 2;

// The sequence of a row, or the padding that it lies in.
struct Sequence {
  int start;    // first row; with seq_idx no further back than a part may look
  int next;     // rows before this one are of the same sequence, unless seq_idx says otherwise
  int initial;  // of the state before `start`; -1 = zeros
  int final;    // of the state whose last columns rows [tail, end) are; -1 = none
  int tail, end;
  bool padding;
};

__device__ inline Sequence sequence_at(const BwdParams& p, int b, int t) {
  const int T = static_cast<int>(p.T);
  Sequence s{0, T, b, b, T, T, false};
  if (p.cu_seqlens.ptr) {
    const int n = static_cast<int>(sequence_of(p.cu_seqlens, p.N, t));
    const Span span = n < 0 ? Span{0, 0} : sequence_span(p.cu_seqlens, n, T);
    s.padding = t >= span.end;
    const int64_t next = n + 1 < p.N ? at(p.cu_seqlens, n + 1) : T;
    s.start = static_cast<int>(s.padding ? span.end : span.start);
    s.next = s.end = static_cast<int>(s.padding ? clamp(next, t + 1, T) : span.end);
    s.initial = s.final = n;
  } else if (p.seq_idx.ptr) {
    const SeqIdx ids(p, b);
    s.padding = ids.id(t) < 0;
    s.start = static_cast<int>(ids.run_start(0, t + 1, 2 * kMaxWidth));
    if (!s.padding && (p.initial.ptr || p.dfinal.ptr)) {
      const Span live = ids.live();
      if (s.start != live.start) s.initial = -1;
      if (ids.id(live.end - 1) != ids.id(t)) s.final = -1;
      s.end = static_cast<int>(live.end);
    }
  }
  if (s.padding || !p.initial.ptr) s.initial = -1;
  if (s.padding || !p.dfinal.ptr) s.final = -1;
  if (s.final < 0) s.end = T;
  s.tail = s.final < 0 ? T : static_cast<int>(clamp(s.end - p.dfinal.len, s.start, s.end));
  return s;
}

// dy * act'(z).
template <typename x_t>
__device__ float through_silu(float dy, float z) {
  float s;
  if constexpr (sizeof(x_t) == 4) {
    s = 1.0f / (1.0f + expf(-z));
  } else {
    s = fast_rcp(1.0f + fast_exp2(z * -1.4426950408889634f));
  }
  return dy * (s * fmaf(z, 1.0f - s, 1.0f));
}
template <typename x_t>
__device__ float2 through_silu(float2 dy, float2 z) {
  return {through_silu<x_t>(dy.x, z.x), through_silu<x_t>(dy.y, z.y)};
}

template <typename Io, int kWidth, bool kExact>
struct Walk {
  using Unit = typename Io::Unit;
  using x_t = typename Io::x_t;

  Taps<Io, kWidth, kExact> taps;
  Window<Io, kWidth> window;
  Window<Io, kWidth> pending;  // dx of the last W-1 rows, without what later rows add
  Unit dw[kWidth][Io::kUnits], db[Io::kUnits];

  __device__ explicit Walk(const BwdParams& p, int64_t c) : taps(p.weight, p.bias, p.W, false, c) {
#pragma unroll
    for (int i = 0; i < Io::kLanes; ++i) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) lane(dw[k], i) = 0.0f;
      lane(db, i) = 0.0f;
    }
  }

  // Takes row t in; dx gets the whole gradient of row t - (kWidth-1).
  __device__ void step(const Unit (&x)[Io::kUnits], const Unit (&dy)[Io::kUnits], bool silu,
                       bool sums, Unit (&dx)[Io::kUnits]) {
#pragma unroll
    for (int i = 0; i < Io::kUnits; ++i) {
      Unit z = taps.bias[i];
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
        if (kExact || k >= taps.first)
          z = fma_unit(taps.w[k][i], k < kWidth - 1 ? window.row[k][i] : x[i], z);
      const Unit g = choose(silu, through_silu<x_t>(dy[i], z), dy[i]);
      if (sums) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k)
          dw[k][i] = fma_unit(g, k < kWidth - 1 ? window.row[k][i] : x[i], dw[k][i]);
        db[i] = add_unit(db[i], g);
      }
#pragma unroll
      for (int k = 0; k < kWidth - 2; ++k) window.row[k][i] = window.row[k + 1][i];
      window.row[kWidth - 2][i] = x[i];

      dx[i] = fma_unit(taps.w[0][i], g, pending.row[0][i]);
#pragma unroll
      for (int k = 1; k < kWidth - 1; ++k)
        pending.row[k - 1][i] = fma_unit(taps.w[k][i], g, pending.row[k][i]);
      pending.row[kWidth - 2][i] = mul_unit(taps.w[kWidth - 1][i], g);
    }
  }
};

// What a thread of the walk addresses: its channels of one batch row, rows by t.
template <typename Io>
struct BwdRows {
  using x_t = typename Io::x_t;
  using Unit = typename Io::Unit;

  const BwdParams& p;
  int64_t b, c;

  __device__ const x_t* x(int64_t t) const { return row(p.x, t); }
  __device__ const x_t* dy(int64_t t) const { return row(p.dy, t); }
  __device__ x_t* dx(int64_t t) const { return row(p.dx, t); }

  // Inputs that row t's taps reach: W-1 of them, from the initial state before the first row.
  template <int kWidth>
  __device__ void history(const Sequence& s, int t, Window<Io, kWidth>& window) const {
    window.clear();
    if (s.padding) return;
#pragma unroll
    for (int k = 1; k < kWidth; ++k) {
      const int from = t - k - s.start;
      if (k >= p.W) break;
      if (from >= 0) {
        Io::unpack(Io::load(x(t - k)), window.row[kWidth - 1 - k]);
      } else if (s.initial >= 0) {
#pragma unroll
        for (int i = 0; i < Io::kLanes; ++i)
          lane(window.row[kWidth - 1 - k], i) =
              state(p.initial, s.initial, i, p.initial.len + from);
      }
    }
  }

  // A row whose gradient is whole but for what the final state's adds.
  __device__ void store_dx(const Sequence& s, int t, Unit (&v)[Io::kUnits]) const {
    if (t >= s.tail && t < s.end) {
#pragma unroll
      for (int i = 0; i < Io::kLanes; ++i)
        lane(v, i) += state(p.dfinal, s.final, i, p.dfinal.len - (s.end - t));
    }
    Io::store(dx(t), v);
  }

 private:
  __device__ x_t* row(const Rows& rows, int64_t t) const {
    return static_cast<x_t*>(rows.ptr) + b * rows.stride_b + t * rows.stride_t + c * rows.stride_d;
  }
  __device__ float state(const State& s, int64_t n, int i, int64_t column) const {
    return load_as_float(s.ptr, n * s.stride_n + (c + i) * s.stride_d + column * s.stride_l,
                         s.dtype);
  }
};

// Rows whose loads leave together, none of them padding.
template <typename Io, int kRows>
struct BwdBatch {
  typename Io::Raw x[kRows], dy[kRows];

  __device__ void load(const BwdRows<Io>& rows, int t) {
    const typename Io::x_t *x_row = rows.x(t), *dy_row = rows.dy(t);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      x[j] = Io::load(x_row + j * rows.p.x.stride_t);
      dy[j] = Io::load(dy_row + j * rows.p.dy.stride_t);
    }
  }

  template <int kWidth, bool kExact>
  __device__ void run(const BwdRows<Io>& rows, Walk<Io, kWidth, kExact>& walk, int first,
                      int t) const {
    constexpr int kLag = kWidth - 1;
    typename Io::x_t* dx_row = rows.dx(t - kLag);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      typename Io::Unit in[Io::kUnits], grad[Io::kUnits], dx[Io::kUnits];
      Io::unpack(x[j], in);
      Io::unpack(dy[j], grad);
      walk.step(in, grad, rows.p.silu, true, dx);
      if (j >= kLag || t + j - kLag >= first) Io::store(dx_row + j * rows.p.dx.stride_t, dx);
    }
  }
};

// Window and pending rows for row t, the rows from `first` on redone without their sums. Their
// loads leave together in the kernels that models use; elsewhere one row's code serves all.
template <typename Io, int kWidth, bool kExact>
__device__ void bwd_enter(const BwdRows<Io>& rows, Walk<Io, kWidth, kExact>& walk,
                          const Sequence& s, int first, int t) {
  constexpr int kLag = kWidth - 1;
  constexpr bool kTogether = kBwdCommon<typename Io::x_t, kWidth, kExact>;
  typename Io::Raw x[kLag], dy[kLag];
  auto load = [&](int j, int row) {
    x[j] = Io::load(rows.x(row));
    dy[j] = Io::load(rows.dy(row));
  };
  auto step = [&](int j) {
    typename Io::Unit in[Io::kUnits], grad[Io::kUnits], dx[Io::kUnits];
    Io::unpack(x[j], in);
    Io::unpack(dy[j], grad);
    walk.step(in, grad, rows.p.silu, false, dx);
  };
  if constexpr (kTogether) {
#pragma unroll
    for (int j = 0; j < kLag; ++j)
      if (t - kLag + j >= first && !s.padding) load(j, t - kLag + j);
  }
  rows.history(s, first, walk.window);
  walk.pending.clear();
  if constexpr (kTogether) {
#pragma unroll
    for (int j = 0; j < kLag; ++j)
      if (t - kLag + j >= first && !s.padding) step(j);
  } else {
#pragma unroll 1
    for (int row = s.padding ? t : first; row < t; ++row) load(0, row), step(0);
  }
}

// Rows [t, stop) one at a time, for what a batch cannot do: padding, dfinal, no dx. Loads run some
// rows ahead.
template <typename Io, int kWidth, bool kExact>
__device__ void bwd_single(const BwdRows<Io>& rows, Walk<Io, kWidth, kExact>& walk,
                           const Sequence& s, int first, int t, int stop) {
  constexpr int kAhead = 4;
  typename Io::Raw x[kAhead]{}, dy[kAhead]{};
  auto load = [&](int from, int j) {
    if (s.padding || from >= stop) return;
    x[j] = Io::load(rows.x(from));
    dy[j] = Io::load(rows.dy(from));
  };
#pragma unroll
  for (int j = 0; j < kAhead; ++j) load(t + j, j);
#pragma unroll 1
  for (; t < stop; ++t) {
    typename Io::Unit in[Io::kUnits], grad[Io::kUnits], dx[Io::kUnits];
    Io::unpack(x[0], in);
    Io::unpack(dy[0], grad);
#pragma unroll
    for (int j = 0; j < kAhead - 1; ++j) x[j] = x[j + 1], dy[j] = dy[j + 1];
    load(t + kAhead, kAhead - 1);
    walk.step(in, grad, rows.p.silu, true, dx);
    if (rows.p.dx.ptr && t - (kWidth - 1) >= first) rows.store_dx(s, t - (kWidth - 1), dx);
  }
}

// Rows of [t, most) that are of t's sequence.
__device__ inline int same_sequence(const BwdParams& p, const Sequence& s, int b, int t, int most) {
  if (!p.seq_idx.ptr) return s.next < most ? s.next - t : most - t;
  const SeqIdx ids(p, b);
  int rows = 1;
  while (t + rows < most && ids.id(t + rows) == ids.id(t)) ++rows;
  return rows;
}

// Rows [begin, end) of one batch row. Its part stores dx of the rows kWidth-1 before each, and of
// the last ones of every sequence that ends here: what a part leaves open the next one redoes.
template <typename Io, int kWidth, bool kExact>
__device__ void bwd_rows(const BwdParams& p, Walk<Io, kWidth, kExact>& walk, int b, int64_t c,
                         int begin, int end) {
  constexpr int kLag = kWidth - 1;
  constexpr int kRows = kBwdCommon<typename Io::x_t, kWidth, kExact> ? kBwdRows : kBwdRowsRare;
  const BwdRows<Io> rows{p, b, c};
  for (int t = begin; t < end;) {
    const Sequence s = sequence_at(p, b, t);
    const int first = t - kLag > s.start ? t - kLag : s.start;
    const int stop = t + same_sequence(p, s, b, t, end);

    // Batches up to where dfinal adds to rows. Without dx rows go one at a time.
    const int last = s.padding || !p.dx.ptr ? t : s.tail + kLag < stop ? s.tail + kLag : stop;
    BwdBatch<Io, kRows> batch;
    if (t + kRows <= last) batch.load(rows, t);
    bwd_enter(rows, walk, s, first, t);
    while (t + kRows <= last) {
      batch.run(rows, walk, first, t);
      t += kRows;
      if (t + kRows <= last) batch.load(rows, t);
    }
    bwd_single(rows, walk, s, first, t, stop);
    t = stop;
    const bool open = t == end && t < p.T && same_sequence(p, s, b, t - 1, t + 1) > 1;
    if (!p.dx.ptr || open) continue;
#pragma unroll
    for (int k = 0; k < kLag; ++k)
      if (t - kLag + k >= first) rows.store_dx(s, t - kLag + k, walk.pending.row[k]);
  }
}

// Registers that do not spill: 96 for W = 4 on SM90; more elsewhere (untuned).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
template <int kWidth>
constexpr int kBwdBlocks = kWidth == 3 ? 8 : kBwdResident;
#else
template <int kWidth>
constexpr int kBwdBlocks = 6;
#endif
template <typename x_t, int kWidth, bool kExact>
constexpr int kBwdMinBlocks = kBwdCommon<x_t, kWidth, kExact> ? kBwdBlocks<kWidth> : 4;

// Blocks: x counts channel blocks, y parts of part_rows rows.
template <typename Io, int kWidth, bool kExact>
__global__ void __launch_bounds__(kBwdThreads, kBwdMinBlocks<typename Io::x_t, kWidth, kExact>)
    bwd_kernel(const __grid_constant__ BwdParams p, int64_t part_rows) {
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * kBwdThreads + threadIdx.x) * Io::kLanes;
  if (c >= p.D) return;
  Walk<Io, kWidth, kExact> walk(p, c);
  const int64_t total = p.B * p.T;
  int64_t row = blockIdx.y * part_rows;
  const int64_t last = row + part_rows < total ? row + part_rows : total;
  for (int64_t b = p.B == 1 ? 0 : row / p.T; row < last; ++b) {
    const int64_t begin = row - b * p.T, end = last - b * p.T < p.T ? last - b * p.T : p.T;
    bwd_rows(p, walk, static_cast<int>(b), c, static_cast<int>(begin), static_cast<int>(end));
    row += end - begin;
  }
  if (p.parts == 0) return;
  float* sums = static_cast<float*>(p.workspace) + blockIdx.y * (p.W + 1) * p.D + c;
#pragma unroll
  for (int i = 0; i < Io::kLanes; ++i) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      if (kExact || k >= walk.taps.first)
        sums[(k - walk.taps.first) * p.D + i] = lane(walk.dw[k], i);
    sums[p.W * p.D + i] = lane(walk.db, i);
  }
}

// Adds the parts up: x counts channels, y taps and then the bias.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) bwd_sum_kernel(const __grid_constant__ BwdParams p) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int k = blockIdx.y;
  const WeightGrad& to = k < p.W ? p.dweight : p.dbias;
  if (c >= p.D || !to.ptr) return;
  const float* from = static_cast<const float*>(p.workspace) + k * p.D + c;
  const int64_t stride = (p.W + 1) * p.D;
  float sum = 0.0f;
#pragma unroll 16
  for (int64_t part = 0; part < p.parts; ++part) sum += from[part * stride];
  store_from_float(to.ptr, c * to.stride_d + (k < p.W ? k * to.stride_w : 0), to.dtype, sum);
}

// dinitial: the taps of a sequence's first W-1 rows reach into it, and what of the final state it
// still holds.
template <typename x_t, int kThreads>
__global__ void __launch_bounds__(kThreads) bwd_state_kernel(const __grid_constant__ BwdParams p) {
  using Io = StridedIo<x_t>;
  constexpr int kWidth = kMaxWidth;
  const int64_t n = static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (n >= p.N || c >= p.D) return;
  const int64_t b = p.cu_seqlens.ptr ? 0 : n;

  // first: the rows after the initial state. carries: rows between it and the final state's end,
  // or none that come from it.
  Span first{0, p.T};
  bool carries = p.dfinal.ptr != nullptr;
  if (p.cu_seqlens.ptr) first = sequence_span(p.cu_seqlens, n, p.T);
  if (p.seq_idx.ptr) {
    const SeqIdx ids(p, b);
    first = ids.live();
    const int64_t longest = p.W - 1 > p.dfinal.len ? p.W - 1 : p.dfinal.len;
    int64_t rows = 0;
    while (first.start + rows < first.end && rows < longest &&
           ids.id(first.start + rows) == ids.id(first.start))
      ++rows;
    carries = carries && first.start + rows == first.end;
    first.end = first.start + rows;
  }
  const int64_t rows = first.end - first.start;

  const BwdRows<Io> at_row{p, b, c};
  Walk<Io, kWidth, false> walk(p, c);
  const Sequence s{
      static_cast<int>(first.start), 0, p.initial.ptr ? static_cast<int>(n) : -1, -1, 0, 0, false};
  at_row.history(s, static_cast<int>(first.start), walk.window);
  walk.pending.clear();
  // After t steps, pending row k is that of row first.start + t - (kWidth-1) + k.
  const int64_t L = p.dinitial.len;
  auto write = [&](int64_t column, float v) {
    // The input at column j is that of row j - L of the sequence.
    const int64_t from = column - L - (rows - p.dfinal.len);
    if (carries && from >= 0 && from < p.dfinal.len)
      v += load_as_float(p.dfinal.ptr,
                         n * p.dfinal.stride_n + c * p.dfinal.stride_d + from * p.dfinal.stride_l,
                         p.dfinal.dtype);
    store_from_float(
        p.dinitial.ptr,
        n * p.dinitial.stride_n + c * p.dinitial.stride_d + column * p.dinitial.stride_l,
        p.dinitial.dtype, v);
  };
#pragma unroll 1
  for (int64_t column = 0; column < L - (p.W - 1); ++column) write(column, 0.0f);
  int64_t t = 0;
#pragma unroll 1
  for (; t < rows && t < p.W - 1; ++t) {
    float x[1], dy[1], dx[1];
    Io::unpack(Io::load(at_row.x(first.start + t)), x);
    Io::unpack(Io::load(at_row.dy(first.start + t)), dy);
    walk.step(x, dy, p.silu, false, dx);
    // Its lag is kWidth-1 rows: with fewer taps, columns before the history get zeros.
    if (const int64_t column = L + t - (kWidth - 1); column >= L - (p.W - 1)) write(column, dx[0]);
  }
#pragma unroll
  for (int k = 0; k < kWidth - 1; ++k)
    if (const int64_t column = L + t - (kWidth - 1) + k; column >= L - (p.W - 1) && column < L)
      write(column, walk.pending.row[k][0]);
}

}  // namespace short_conv::cuda
