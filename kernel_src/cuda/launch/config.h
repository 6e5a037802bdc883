// Which kernel a problem gets, as pure functions of the parameters. No CUDA, no torch.
#pragma once

#include <cstdint>

#include "../../params.h"

namespace short_conv::cuda {

// 64 threads with 8 rows each: 1.03 of a copy at [1, 8192, 8192] bf16 on an H200, against 1.04
// for 128 threads with 16 rows and 1.21 for 32 rows (fewer, longer chains of loads).
constexpr int kFwdThreads = 64;
constexpr int kFwdTokens = 8;

// Untuned.
constexpr int kUpdateThreads = 128;

inline int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

inline bool aligned16(const void* ptr) { return reinterpret_cast<uintptr_t>(ptr) % 16 == 0; }

// Every 16-byte access of neighbouring channels is aligned; a stride never taken does not matter.
inline bool vectorizable(const Rows& r, DType dtype, int64_t B, int64_t T, int64_t D) {
  const int64_t lanes = 16 / size_of(dtype);
  return r.stride_d == 1 && D % lanes == 0 && aligned16(r.ptr) &&
         (B <= 1 || r.stride_b % lanes == 0) && (T <= 1 || r.stride_t % lanes == 0);
}

inline bool packed_weight(const Weight& w, int32_t W) {
  return aligned16(w.ptr) && w.stride_w == 1 && w.stride_d == W;
}

inline bool fwd_vectorized(const FwdParams& p) {
  return vectorizable(p.x, p.dtype, p.B, p.T, p.D) &&
         (!p.y.ptr || vectorizable(p.y, p.dtype, p.B, p.T, p.D));
}

// Whole state rows: one token a sequence, contiguous [D, L] rows with L = W-1 or W.
inline bool update_by_rows(const UpdateParams& p) {
  const int64_t lanes = 16 / size_of(p.dtype);
  const State& s = p.state;
  return p.T == 1 && !p.cu_seqlens.ptr && !p.circular.ptr && !p.accepted.ptr &&
         (s.dtype == p.dtype || s.dtype == DType::kFloat32) && s.stride_l == 1 &&
         s.stride_d == s.len && (s.len == p.W || s.len == p.W - 1) && aligned16(s.ptr) &&
         (s.count <= 1 || s.stride_n * size_of(s.dtype) % 16 == 0) &&
         lanes * s.len * size_of(s.dtype) % 16 == 0 &&
         vectorizable(p.x, p.dtype, p.B, 1, p.D) && vectorizable(p.y, p.dtype, p.B, 1, p.D);
}

}  // namespace short_conv::cuda
