// Which kernel a problem gets, as pure functions of the parameters. No CUDA, no torch.
#pragma once

#include <cstdint>
#include <limits>

#include "../../params.h"

namespace short_conv::cuda {

// A thread takes two channels and many rows: short chains in many warps hide DRAM best. On an
// H200 in bf16, as ratios to copy_ at [1, 8192, 8192] and [1, 2048, 8192]: 2 channels with 16 rows
// 1.03 and 1.07, with 8 rows 1.10 and 1.10, with 32 rows 1.05 and 1.11; 4 channels with 16 rows
// 1.06 and 1.15; 8 channels with 8 rows 1.33 and 1.39; bulk copies into shared memory (3 stages of
// 8 rows) 1.20 and 1.35. 64 or 128 threads made no difference beyond 1%.
constexpr int kFwdLanes = 2;
constexpr int kFwdThreads = 64;
constexpr int kFwdTokens = 16;
constexpr int kFwdTokensPacked = 15;  // 16 spill in 64 registers
// While all tiles fit the chip at once, shorter ones end sooner: 2.90 against 3.06 us at
// [1, 64, 8192], and no gain from [1, 512, 8192] on. For the common width only.
constexpr int kFwdTokensShort = 4;
constexpr int kCommonWidth = 4;
inline bool fwd_short(const FwdParams& p) { return p.B * p.T * p.D < 1 << 20; }

// Untuned.
constexpr int kUpdateThreads = 128;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline bool aligned(const void* ptr, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(ptr) % bytes == 0;
}

// Every access of `lanes` neighbouring channels is aligned; a stride never taken does not matter.
inline bool vectorizable(const Rows& r, DType dtype, int64_t lanes, int64_t B, int64_t T,
                         int64_t D) {
  return r.stride_d == 1 && D % lanes == 0 && aligned(r.ptr, lanes * size_of(dtype)) &&
         (B <= 1 || r.stride_b % lanes == 0) && (T <= 1 || r.stride_t % lanes == 0);
}

inline bool packed(const Weight& w, int32_t W) {
  return aligned(w.ptr, 16) && w.stride_w == 1 && w.stride_d == W;
}

// y.ptr null: only final states are asked for, and weight is unused.
inline bool fwd_vectorized(const FwdParams& p) {
  return vectorizable(p.x, p.dtype, kFwdLanes, p.B, p.T, p.D) &&
         (!p.y.ptr ||
          (vectorizable(p.y, p.dtype, kFwdLanes, p.B, p.T, p.D) && packed(p.weight, p.W)));
}

// The backward walks all rows in parts, as many as the device holds at once: a part costs its first
// rows twice and W + 1 sums a channel. On an H200 in bf16, as ratios to copy_ at [1, 8192, 8192]
// (floor 1.5): 12 or 16 rows a batch in 96 registers 1.80, 8 rows in 72 or 80 1.92, cp.async
// rings of 12 to 24 rows 1.96 to 2.26, 96 registers and small parts behind the large ones 1.86 to
// 2.24, short blocks of 8 warps with their sums in shared memory 2.11 to 2.71. A bare addition of
// two tensors in this shape takes 1.70, and 1.46 in blocks that do not stay.
constexpr int kBwdThreads = 64;
constexpr int kBwdRows = 12;           // whose loads leave together
constexpr int kBwdRowsRare = 4;        // the same for fp32, long and run-time widths: less code
constexpr int kBwdResident = 10;       // blocks of a multiprocessor
constexpr int64_t kBwdLeastRows = 64;  // of a part, so that sums stay few beside rows
constexpr int kBwdSumThreads = 128;

// [B, D, T] memory: blocks of some spans of 16 bytes of one channel's rows a thread. Not timed yet
// in this form; hoisting all loads of 4 spans took 1.30 of a copy at [1, 8192, 8192] on an H200.
constexpr int kChannelFirstThreads = 128;
constexpr int kChannelFirstSpans = 8;
constexpr int kChannelFirstAhead = 1;  // spans whose loads are under way

inline int64_t channel_first_rows(DType dtype) {
  return kChannelFirstSpans * kChannelFirstThreads * 16 / size_of(dtype);
}

// Rows of a channel fill whole 16-byte accesses.
inline bool channel_first(const Rows& r, DType dtype, int64_t B, int64_t T, int64_t D) {
  const int64_t elements = 16 / size_of(dtype);
  return r.stride_t == 1 && T % elements == 0 && aligned(r.ptr, 16) &&
         (B <= 1 || r.stride_b % elements == 0) && (D <= 1 || r.stride_d % elements == 0);
}

inline bool fwd_channel_first(const FwdParams& p) {
  return p.y.ptr && channel_first(p.x, p.dtype, p.B, p.T, p.D) &&
         channel_first(p.y, p.dtype, p.B, p.T, p.D);
}

// Nothing reaches into a row but the rows before it, or only into rows that a head item writes.
inline bool fwd_plain(const FwdParams& p) {
  return !p.slots.ptr && !p.cu_seqlens.ptr && !p.seq_idx.ptr;
}

// Whole batches, as long as no sequence ends among them.
inline int64_t bwd_part_rows(const BwdParams& p, int64_t processors) {
  const int64_t channel_blocks = ceil_div(p.D, kBwdThreads * kFwdLanes);
  const int64_t parts = processors * kBwdResident / (channel_blocks ? channel_blocks : 1);
  const int64_t rows = ceil_div(p.B * p.T, parts ? parts : 1);
  return ceil_div(rows > kBwdLeastRows ? rows : kBwdLeastRows, kBwdRows) * kBwdRows;
}

inline bool bwd_vectorized(const BwdParams& p) {
  auto whole = [&](const Rows& r) {
    return !r.ptr || vectorizable(r, p.dtype, kFwdLanes, p.B, p.T, p.D);
  };
  return whole(p.x) && whole(p.dy) && whole(p.dx) && packed(p.weight, p.W);
}

// dx may be absent. What states and packing need is the other kernels' business.
inline bool bwd_channel_first(const BwdParams& p) {
  auto whole = [&](const Rows& r) { return channel_first(r, p.dtype, p.B, p.T, p.D); };
  return !bwd_vectorized(p) && whole(p.x) && whole(p.dy) && (!p.dx.ptr || whole(p.dx)) &&
         !p.initial.ptr && !p.dfinal.ptr && !p.cu_seqlens.ptr && !p.seq_idx.ptr;
}

inline int64_t bwd_parts(const BwdParams& p, int64_t part_rows) {
  if (bwd_channel_first(p))
    return p.B * ceil_div(p.T, channel_first_rows(p.dtype)) * (kChannelFirstThreads / 32);
  return ceil_div(p.B * p.T, part_rows);
}

inline bool fwd_has_heads(const FwdParams& p) { return p.initial.ptr || p.final.ptr; }

// Head items of a block: one, while they are few, since each is a chain of memory latencies; more
// where blocks would be all launch.
inline int fwd_head_sequences(int64_t items) { return items > 1 << 17 ? 4 : 1; }

// The common dense kernels run head items themselves; see fwd_kernel.cuh.
inline bool fwd_heads_in_tiles(const FwdParams& p) {
  return p.y.ptr && !p.cu_seqlens.ptr && !p.seq_idx.ptr && p.W == kCommonWidth &&
         size_of(p.dtype) == 2 && fwd_vectorized(p);
}

// States as whole contiguous rows [D, W] of x's dtype, such as the cache of a transformers model.
inline bool fwd_state_rows(const FwdParams& p) {
  auto rows = [&](const State& s) {
    return !s.ptr ||
           (s.dtype == p.dtype && s.len == p.W && s.stride_l == 1 && s.stride_d == s.len &&
            aligned(s.ptr, 16) && (s.count <= 1 || s.stride_n * size_of(s.dtype) % 16 == 0));
  };
  return rows(p.initial) && rows(p.final);
}

// Channels a thread takes when it moves whole state rows: at B 256, D 8192 on an H200, 2 channels
// (16 bytes of a bf16 state of 4 columns) took 1.25 of a copy of the state, 4 took 1.39, 8 1.73.
constexpr int kUpdateLanes = 2;

// Whole state rows: one token a sequence, contiguous [D, L] rows with L = W-1 or W.
inline bool update_by_rows(const UpdateParams& p) {
  const State& s = p.state;
  const int64_t size = size_of(s.dtype);
  return p.T == 1 && p.D <= std::numeric_limits<int32_t>::max() / 2 && !p.cu_seqlens.ptr &&
         !p.circular.ptr && !p.accepted.ptr && (s.dtype == p.dtype || s.dtype == DType::kFloat32) &&
         s.stride_l == 1 && s.stride_d == s.len && (s.len == p.W || s.len == p.W - 1) &&
         aligned(s.ptr, 16) && (s.count <= 1 || s.stride_n * size % 16 == 0) &&
         packed(p.weight, p.W) && vectorizable(p.x, p.dtype, kUpdateLanes, p.B, 1, p.D) &&
         vectorizable(p.y, p.dtype, kUpdateLanes, p.B, 1, p.D);
}

}  // namespace short_conv::cuda
