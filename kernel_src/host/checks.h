// Tensor facts that keep the kernels memory-safe, each refused with argument, rule and got-value.
// What the operation means (activations, exclusive arguments) is the Python contract's business.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "../params.h"

namespace short_conv {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string shape_of(const Tensor& t) {
  std::string s = "[";
  for (int64_t i = 0; i < t.dim(); ++i) s += (i ? ", " : "") + std::to_string(t.size(i));
  return s + "]";
}

inline void check_shape(const Tensor& t, const char* name, const char* rule,
                        std::initializer_list<int64_t> shape) {
  bool same = t.dim() == static_cast<int64_t>(shape.size());
  int64_t i = 0;
  for (int64_t size : shape) same = same && t.size(i++) == size;
  STD_TORCH_CHECK(same, name, " must have shape ", rule, ", got ", shape_of(t));
}

inline std::optional<DType> float_dtype(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Double: return DType::kFloat64;
    default: return std::nullopt;
  }
}

// fp64 only meets fp64 and fp32: the kernels accumulate everything else in fp32.
inline DType check_dtype(const Tensor& t, const char* name, bool allowed_f64) {
  std::optional<DType> dtype = float_dtype(t);
  STD_TORCH_CHECK(dtype && (*dtype != DType::kFloat64 || allowed_f64), name,
                  " must be bfloat16, float16 or float32", allowed_f64 ? ", or float64 like x" : "",
                  ", got ScalarType ", static_cast<int>(t.scalar_type()));
  return *dtype;
}

inline DType check_dtype_like(const Tensor& t, const char* name, DType x_dtype) {
  DType dtype = check_dtype(t, name, x_dtype == DType::kFloat64);
  STD_TORCH_CHECK(dtype == x_dtype || dtype == DType::kFloat32, name,
                  " must have x's dtype or float32, got ScalarType ",
                  static_cast<int>(t.scalar_type()));
  return dtype;
}

inline void check_device(const Tensor& t, const char* name, const Tensor& x) {
  STD_TORCH_CHECK(t.is_cpu() == x.is_cpu() && t.get_device_index() == x.get_device_index(), name,
                  " must be on x's device (index ", x.get_device_index(), "), got device index ",
                  t.get_device_index());
}

// A written tensor whose elements share storage would be a race.
inline void check_distinct(const Tensor& t, const char* name) {
  for (int64_t i = 0; i < t.dim(); ++i)
    STD_TORCH_CHECK(t.size(i) <= 1 || t.stride(i) != 0, name,
                    " is written and must not be expanded, got stride 0 in dim ", i);
}

// Byte range [first, last) that a tensor can touch.
inline std::pair<uintptr_t, uintptr_t> extent(const Tensor& t) {
  uintptr_t first = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  if (t.numel() == 0) return {first, first};
  int64_t last = 0;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  return {first, first + (last + 1) * t.element_size()};
}

inline bool extents_meet(const Tensor& a, const Tensor& b) {
  auto [a0, a1] = extent(a);
  auto [b0, b1] = extent(b);
  return a0 < b1 && b0 < a1;
}

inline bool same_storage(const Tensor& a, const Tensor& b) {
  if (a.const_data_ptr() != b.const_data_ptr() || a.dim() != b.dim() ||
      a.scalar_type() != b.scalar_type())
    return false;
  for (int64_t i = 0; i < a.dim(); ++i)
    if (a.size(i) != b.size(i) || a.stride(i) != b.stride(i)) return false;
  return true;
}

// Two column slices of one wider row (last dim contiguous, equal pitch) interleave in memory
// without sharing an element.
inline bool disjoint_columns(const Tensor& a, const Tensor& b) {
  const int64_t dims = a.dim(), D = a.size(dims - 1);
  if (b.dim() != dims || dims < 2 || a.element_size() != b.element_size()) return false;
  const int64_t pitch = a.stride(dims - 2), size = a.element_size();
  for (int64_t i = 0; i < dims; ++i)
    if (a.size(i) != b.size(i) || a.stride(i) != b.stride(i)) return false;
  for (int64_t i = 0; i < dims - 1; ++i)
    if (pitch <= 0 || (a.size(i) > 1 && a.stride(i) % pitch != 0)) return false;
  const int64_t bytes =
      static_cast<const char*>(b.const_data_ptr()) - static_cast<const char*>(a.const_data_ptr());
  const int64_t shift = ((bytes / size) % pitch + pitch) % pitch;
  return a.stride(dims - 1) == 1 && bytes % size == 0 && shift >= D && pitch - shift >= D;
}

inline void check_no_overlap(const Tensor& written, const char* name, const Tensor& other,
                             const char* other_name) {
  STD_TORCH_CHECK(!extents_meet(written, other) || disjoint_columns(written, other), name,
                  " must not overlap ", other_name, ", got overlapping storage");
}

}  // namespace short_conv
