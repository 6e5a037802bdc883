// Checked tensors -> the fields of the parameter structs.
#pragma once

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

inline void check_out(const Tensor& out, const Tensor& x) {
  bool same = out.dim() == x.dim() && out.scalar_type() == x.scalar_type();
  for (int64_t i = 0; same && i < x.dim(); ++i) same = out.size(i) == x.size(i);
  STD_TORCH_CHECK(same, "out must have x's shape ", shape_of(x), " and dtype, got ", shape_of(out));
  check_device(out, "out", x);
  check_distinct(out, "out");
  check_no_overlap(out, "out", x, "x");
}

}  // namespace short_conv
