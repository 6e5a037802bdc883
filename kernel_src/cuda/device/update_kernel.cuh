// Decode update. A thread owns kLanes channels of one sequence: it reads their history, consumes
// the sequence's tokens, and only then writes their state columns, so the state advances in place.
#pragma once

#include "math.cuh"
#include "segments.cuh"
#include "state_row.cuh"

namespace short_conv::cuda {

__device__ inline int64_t wrap(int64_t v, int64_t L) {
  const int64_t r = v % L;
  return r < 0 ? r + L : r;
}

// Any layout, any mode, one channel a thread.
template <typename x_t>
__device__ void update_channel(const UpdateParams& p, int64_t n, int64_t slot, Span span,
                               int64_t c) {
  using Io = StridedIo<x_t>;
  constexpr int kWidth = kMaxWidth;
  const int64_t b = p.cu_seqlens.ptr ? 0 : n, L = p.state.len, T = span.end - span.start;
  const x_t* x = static_cast<const x_t*>(p.x.ptr) + b * p.x.stride_b + c * p.x.stride_d +
                 span.start * p.x.stride_t;
  x_t* y =
      static_cast<x_t*>(p.y.ptr) + b * p.y.stride_b + c * p.y.stride_d + span.start * p.y.stride_t;
  const int64_t base = slot * p.state.stride_n + c * p.state.stride_d;
  auto read = [&](int64_t column) {
    return load_as_float(p.state.ptr, base + column * p.state.stride_l, p.state.dtype);
  };
  auto write = [&](int64_t column, float v) {
    store_from_float(p.state.ptr, base + column * p.state.stride_l, p.state.dtype, v);
  };

  // Columns [0, known) are inputs that count; the history is the last W-1 of them.
  const int64_t known = p.accepted.ptr ? p.W - 1 + clamp(at(p.accepted, n), 0, L - (p.W - 1)) : L;
  int64_t position = p.circular.ptr ? wrap(at(p.circular, n), L) : 0;

  const Taps<Io, kWidth, false> taps(p.weight, p.bias, p.W, p.silu, c);
  Window<Io, kWidth> window;
  window.clear();
#pragma unroll
  for (int k = 1; k < kWidth; ++k)
    if (k < p.W)
      window.row[kWidth - 1 - k][0] = read(!p.circular.ptr ? known - k
                                           : position < k  ? position - k + L
                                                           : position - k);

#pragma unroll 1
  for (int64_t t = 0; t < T; ++t) {
    float in[1], out[1];
    Io::unpack(Io::load(x + t * p.x.stride_t), in);
    window.step(taps, in, p.silu, out);
    Io::store(y + t * p.y.stride_t, out);
    if (!p.circular.ptr) continue;
    write(position, in[0]);
    position = position + 1 < L ? position + 1 : 0;
  }
  if (p.circular.ptr || T == 0) return;

  // Column j takes input j + shift of (known columns, then x). In place this ascends when columns
  // move left and descends when rejected tokens make them move right.
  const int64_t shift = known + T - L;
#pragma unroll 1
  for (int64_t i = 0; i < L; ++i) {
    const int64_t j = shift >= 0 ? i : L - 1 - i, from = j + shift;
    if (from >= known) {
      float in[1];
      Io::unpack(Io::load(x + (from - known) * p.x.stride_t), in);
      write(j, in[0]);
    } else {
      write(j, from >= 0 ? read(from) : 0.0f);
    }
  }
}

// Blocks: x counts channel blocks, y and z sequences.
__device__ inline int64_t sequence_of_block() {
  return static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
}

template <typename x_t, int kThreads>
__global__ void __launch_bounds__(kThreads) update_kernel(const __grid_constant__ UpdateParams p) {
  const int64_t n = sequence_of_block();
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (n >= p.N || c >= p.D) return;
  const Span span = p.cu_seqlens.ptr ? sequence_span(p.cu_seqlens, n, p.T) : Span{0, p.T};
  const int64_t slot = slot_of(p.slots, p.state.count, n);
  if (slot >= 0) {
    update_channel<x_t>(p, n, slot, span, c);
    return;
  }
  x_t* y =
      static_cast<x_t*>(p.y.ptr) + (p.cu_seqlens.ptr ? 0 : n) * p.y.stride_b + c * p.y.stride_d;
  for (int64_t t = span.start; t < span.end; ++t) y[t * p.y.stride_t] = from_float<x_t>(0.0f);
}

// What whole-row updates need of UpdateParams: two cache lines of parameters, not six. Reading them
// is on the critical path of a decode step (1.29 against 1.50 us at B 1, D 2048 on an H200).
struct RowUpdate {
  const void *x, *weight, *bias;
  void *y, *state;
  int64_t x_stride, y_stride, state_stride, bias_stride;  // of a sequence; of a bias channel
  Index slots;
  int64_t count, N;
  int32_t D;
  DType weight_dtype, bias_dtype;
  bool silu;

  explicit RowUpdate(const UpdateParams& p)
      : x(p.x.ptr),
        weight(p.weight.ptr),
        bias(p.bias.ptr),
        y(p.y.ptr),
        state(p.state.ptr),
        x_stride(p.x.stride_b),
        y_stride(p.y.stride_b),
        state_stride(p.state.stride_n),
        bias_stride(p.bias.stride_d),
        slots(p.slots),
        count(p.state.count),
        N(p.N),
        D(static_cast<int32_t>(p.D)),
        weight_dtype(p.weight.dtype),
        bias_dtype(p.bias.dtype),
        silu(p.silu) {}
};

// One token a sequence, state rows contiguous [D, kLen]: whole rows move by vector accesses. A warp
// reads all of its rows before it writes one. 8 blocks: with no bound ptxas spills fp16 of W = 8.
template <typename Io, typename s_t, int kWidth, int kLen, int kThreads>
__global__ void __launch_bounds__(kThreads, 8)
    update_row_kernel(const __grid_constant__ RowUpdate p) {
  using x_t = typename Io::x_t;
  using Row = StateRow<s_t, Io::kLanes, kLen>;
  constexpr int kLanes = Io::kLanes;
  const int64_t n = sequence_of_block();
  const int32_t c = (static_cast<int32_t>(blockIdx.x) * kThreads + threadIdx.x) * kLanes;
  // Staged rows want the whole warp, with its lanes past the last channel.
  const int32_t from = Row::kStaged ? c - static_cast<int32_t>(threadIdx.x) % 32 * kLanes : c;
  if (n >= p.N || from >= p.D) return;
  const bool inside = !Row::kStaged || c < p.D;
  x_t* y = static_cast<x_t*>(p.y) + n * p.y_stride + c;
  typename Io::Raw raw{};
  if (inside) raw = Io::load(static_cast<const x_t*>(p.x) + n * p.x_stride + c);
  typename Io::Unit in[Io::kUnits], out[Io::kUnits];

  const int64_t slot = slot_of(p.slots, p.count, n);
  if (slot < 0) {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) lane(out, i) = 0.0f;
    if (inside) Io::store(y, out);
    return;
  }
  s_t* state =
      static_cast<s_t*>(p.state) + slot * p.state_stride + static_cast<int64_t>(from) * kLen;
  const int words = static_cast<int>((p.D - from < 32 * kLanes ? p.D - from : 32 * kLanes) * kLen *
                                     sizeof(s_t) / 4);
  __shared__ uint32_t stage[Row::kStaged ? kThreads * Row::kWords : 1];
  Row row;
  if constexpr (Row::kStaged) {
    row.load(state, words, stage);
  } else {
    row.load(state);
  }
  if (inside) {
    const Taps<Io, kWidth, true> taps({p.weight, kWidth, 1, p.weight_dtype},
                                      {p.bias, p.bias_stride, p.bias_dtype}, kWidth, p.silu, c);
    Io::unpack(raw, in);
    Window<Io, kWidth> window;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
#pragma unroll
      for (int k = 1; k < kWidth; ++k)
        lane(window.row[kWidth - 1 - k], i) = to_float(row(i, kLen - k));
#pragma unroll
      for (int l = 0; l < kLen - 1; ++l) row(i, l) = row(i, l + 1);
      row(i, kLen - 1) = from_float<s_t>(lane(in, i));
    }
    window.step(taps, in, p.silu, out);
  }
  if constexpr (Row::kStaged) {
    row.store(state, words, stage);
  } else {
    row.store(state);
  }
  if (inside) Io::store(y, out);
}

}  // namespace short_conv::cuda
