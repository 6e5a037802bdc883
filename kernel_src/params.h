// The structs that cross from host to kernel code. Plain data: sizes, strides in elements
// (int64 everywhere: a packed GLM-5 batch passes 2^31 elements at 87k tokens), raw pointers.
#pragma once

#include <cstdint>

namespace short_conv {

constexpr int kMaxWidth = 8;

enum class DType : int32_t { kFloat32, kFloat16, kBFloat16, kFloat64 };

// Activations, [B, T, D]. A packed or varlen call has B = 1.
struct Rows {
  void* ptr;
  int64_t stride_b, stride_t, stride_d;
};

// Per-channel taps [D, W], oldest tap first.
struct Weight {
  const void* ptr;
  int64_t stride_d, stride_w;
  DType dtype;
};

// [D]; ptr null = no bias.
struct Bias {
  const void* ptr;
  int64_t stride_d;
  DType dtype;
};

// Raw inputs oldest to newest, [N or S, D, L]; the history is always the last W-1 columns.
// ptr null = no state: an absent initial state reads as zeros, an absent final state is not
// written.
struct State {
  void* ptr;
  int64_t stride_n, stride_d, stride_l;
  int64_t count;  // N, or the S slots of a pool
  int64_t len;    // L
  DType dtype;
};

// A vector of int32, or of int64 when wide; ptr null = absent.
struct Index {
  const void* ptr;
  int64_t stride;
  bool wide;
};

// Bulk forward: y[t] = act(bias + sum_k w[k] * x[t - (W-1) + k]) within each sequence.
//
// Dense: sequence n is batch row n. cu_seqlens: sequence n is rows [cu[n], cu[n+1]) of the one
// batch row, values clamped into [0, T] and to non-decreasing by the reader; rows past cu[N] get
// y = 0. seq_idx: tap k of row t counts only where seq_idx[t-k] == seq_idx[t], rows with
// seq_idx < 0 get y = 0; the initial state continues batch row b's first sequence and the final
// state is that of its last one.
//
// y.ptr null = only final states are wanted (weight is then unused).
// final may be the very storage of initial (same strides, same len), never a partial overlap.
// With slots, sequence n reads and writes state row slots[n]; a slot outside [0, count) makes the
// sequence a padding row: y = 0 and no state touched. has_initial[n] false (one byte each, null =
// all true) makes sequence n start from zeros whatever its slot holds.
struct FwdParams {
  Rows x, y;
  Weight weight;
  Bias bias;
  int64_t B, T, D;
  int64_t N;  // sequences: len(cu_seqlens) - 1 when packed, else B
  int32_t W;
  bool silu;
  DType dtype;  // of x and y
  State initial, final;
  Index cu_seqlens;  // [N + 1]
  Index seq_idx;     // [B, T]: stride is along T
  int64_t seq_idx_stride_b;
  Index slots;  // [N]
  const uint8_t* has_initial;
  int64_t has_initial_stride;
};

// Decode update: sequence n consumes T tokens (varlen: rows [cu[n], cu[n+1]) of batch row 0) and
// its state row advances in place.
//
// History: the last W-1 columns; with accepted: the W-1 columns that start at column
// clamp(accepted[n], 0, L-(W-1)), everything right of them was rejected and is forgotten; with
// circular: the W-1 columns before column circular[n] modulo L, oldest first.
// After the call all L columns hold the last L inputs (columns older than what is known read 0);
// circular instead writes token t at column (circular[n] + t) modulo L and leaves the rest.
// A sequence of no tokens leaves its row as it is, whatever its counts say. A slot outside
// [0, count) makes row n padding: y = 0 and nothing touched.
struct UpdateParams {
  Rows x, y;
  State state;
  Weight weight;
  Bias bias;
  int64_t B, T, D;
  int64_t N;  // sequences: len(cu_seqlens) - 1 when varlen, else B
  int32_t W;
  bool silu;
  DType dtype;
  Index cu_seqlens;  // [N + 1]
  Index slots;       // [N]
  Index circular;    // [N]
  Index accepted;    // [N]
};

// A gradient of Weight or Bias, written whole; ptr null = not wanted. A bias has stride_w = 0.
struct WeightGrad {
  void* ptr;
  int64_t stride_d, stride_w;
  DType dtype;
};

// Backward of FwdParams, from x and dy alone: pre-activations are recomputed.
//
//   z[t]  = bias + sum_k w[k] * x[t - (W-1) + k]      g[t] = dy[t] * act'(z[t])
//   dx[t] = sum_k w[k] * g[t + (W-1) - k]             within t's own sequence
//   dweight[k] = sum_t g[t] * x[t - (W-1) + k]        dbias = sum_t g[t]
//
// where x reaches into the initial state. Column j of a final state is the input at row
// end - L + j of its sequence, so dfinal adds to dx there, and to dinitial where that row is the
// initial state's. dinitial is written in all of its L columns. Padding rows get dx = 0 and
// contribute nothing, whatever x and dy hold there. Sequences are told as in FwdParams.
//
// Sums over t: the backend cuts all rows into `parts` and leaves each part's sums in workspace
// [parts, W + 1, D] (fp32, fp64 for fp64 x; row W is the bias), then adds parts up in order: the
// same bits in every run.
struct BwdParams {
  Rows x, dy, dx;  // dx.ptr null = not wanted
  Weight weight;
  Bias bias;
  WeightGrad dweight, dbias;
  int64_t B, T, D;
  int64_t N;
  int32_t W;
  bool silu;
  DType dtype;  // of x, dy and dx
  State initial, dinitial, dfinal;
  Index cu_seqlens;
  Index seq_idx;
  int64_t seq_idx_stride_b;
  int64_t parts;  // 0: neither dweight nor dbias is wanted
  void* workspace;
};

}  // namespace short_conv
