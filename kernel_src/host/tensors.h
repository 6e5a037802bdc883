// Checked tensors -> the fields of the parameter structs.
#pragma once

#include <tuple>

#include "checks.h"

namespace short_conv {

using OptionalTensor = std::optional<Tensor>;

inline Weight weight_of(const Tensor& weight, const Tensor& x, DType x_dtype, int64_t D) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) == D && weight.size(1) >= 1 &&
                      weight.size(1) <= kMaxWidth,
                  "weight must have shape [D, W] with D=", D, " and W from 1 to ", kMaxWidth,
                  ", got ", shape_of(weight));
  check_device(weight, "weight", x);
  return {weight.const_data_ptr(), weight.stride(0), weight.stride(1),
          check_dtype_like(weight, "weight", x_dtype)};
}

inline Bias bias_of(const OptionalTensor& bias, const Tensor& x, DType x_dtype, int64_t D) {
  if (!bias) return {};
  check_shape(*bias, "bias", "[D]", {D});
  check_device(*bias, "bias", x);
  return {bias->const_data_ptr(), bias->stride(0), check_dtype_like(*bias, "bias", x_dtype)};
}

// count < 0: a pool of any number of slots.
inline State state_of(const Tensor& state, const char* name, const Tensor& x, DType x_dtype,
                      int64_t count, int64_t D, int64_t W) {
  STD_TORCH_CHECK(state.dim() == 3 && (count < 0 || state.size(0) == count) && state.size(1) == D &&
                      state.size(2) >= W - 1,
                  name, " must have shape [", count < 0 ? "S" : "N", ", D, L] with",
                  count < 0 ? "" : " N=" + std::to_string(count), " D=", D, " and L >= ", W - 1,
                  ", got ", shape_of(state));
  check_device(state, name, x);
  return {const_cast<void*>(state.const_data_ptr()),
          state.stride(0),
          state.stride(1),
          state.stride(2),
          state.size(0),
          state.size(2),
          check_dtype(state, name, x_dtype == DType::kFloat64)};
}

inline Index index_of(const Tensor& index, const char* name, const Tensor& x) {
  const bool wide = index.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(wide || index.scalar_type() == ScalarType::Int, name,
                  " must be int32 or int64, got ScalarType ",
                  static_cast<int>(index.scalar_type()));
  check_device(index, name, x);
  return {index.const_data_ptr(), index.stride(index.dim() - 1), wide};
}

// [N]
inline Index index_of(const OptionalTensor& index, const char* name, const Tensor& x, int64_t N) {
  if (!index) return {};
  check_shape(*index, name, "[N]", {N});
  return index_of(*index, name, x);
}

// [N + 1]; returns N beside it.
inline std::pair<Index, int64_t> offsets_of(const Tensor& cu_seqlens, const Tensor& x) {
  STD_TORCH_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1,
                  "cu_seqlens must have shape [N + 1], got ", shape_of(cu_seqlens));
  return {index_of(cu_seqlens, "cu_seqlens", x), cu_seqlens.size(0) - 1};
}

inline void check_like(const Tensor& t, const char* name, const Tensor& other,
                       const char* other_name) {
  bool same = t.dim() == other.dim() && t.scalar_type() == other.scalar_type();
  for (int64_t i = 0; same && i < t.dim(); ++i) same = t.size(i) == other.size(i);
  STD_TORCH_CHECK(same, name, " must have ", other_name, "'s shape ", shape_of(other),
                  " and dtype, got ", shape_of(t));
  check_device(t, name, other);
}

inline void check_out(const Tensor& out, const Tensor& x) {
  check_like(out, "out", x, "x");
  check_distinct(out, "out");
  check_no_overlap(out, "out", x, "x");
}

// [B, T, D]
inline Rows rows_of(const Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1), t.stride(2)};
}

// The convolution itself, which forward and backward are told alike: x, taps and sequences.
template <typename Params>
Params convolution_of(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& cu_seqlens, const OptionalTensor& seq_idx, bool silu) {
  STD_TORCH_CHECK(x.dim() == 3, "x must be [B, T, D], got ", shape_of(x));
  Params p{};
  p.B = x.size(0), p.T = x.size(1), p.D = x.size(2), p.N = p.B;
  p.silu = silu;
  p.dtype = check_dtype(x, "x", x.is_cpu());
  p.x = rows_of(x);
  p.weight = weight_of(weight, x, p.dtype, p.D);
  p.W = static_cast<int32_t>(weight.size(1));
  p.bias = bias_of(bias, x, p.dtype, p.D);
  if (cu_seqlens) {
    STD_TORCH_CHECK(p.B == 1, "x must be [1, T, D] when cu_seqlens is given, got ", shape_of(x));
    STD_TORCH_CHECK(!seq_idx, "cu_seqlens and seq_idx must not both be given, got both");
    std::tie(p.cu_seqlens, p.N) = offsets_of(*cu_seqlens, x);
  }
  if (seq_idx) {
    check_shape(*seq_idx, "seq_idx", "[B, T]", {p.B, p.T});
    p.seq_idx = index_of(*seq_idx, "seq_idx", x);
    p.seq_idx_stride_b = seq_idx->stride(0);
  }
  return p;
}

}  // namespace short_conv
