// Element types and values whose dtype is known only at run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../../params.h"

// Where the lanes of a warp meet: on a GPU, and in the test that runs each as a host thread. The
// rest of the host emulation runs them one after the other.
#if defined(__CUDA_ARCH__) || defined(EMULATED_WARPS)
#define SHORT_CONV_WARPS
#endif

namespace short_conv::cuda {

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(__half v) { return __half2float(v); }
__device__ inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ T from_float(float v) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(v);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(v);
  } else {
    return v;
  }
}

__device__ inline float load_as_float(const void* ptr, int64_t i, DType dtype) {
  switch (dtype) {
    case DType::kFloat16: return to_float(static_cast<const __half*>(ptr)[i]);
    case DType::kBFloat16: return to_float(static_cast<const __nv_bfloat16*>(ptr)[i]);
    default: return static_cast<const float*>(ptr)[i];
  }
}

__device__ inline void store_from_float(void* ptr, int64_t i, DType dtype, float v) {
  switch (dtype) {
    case DType::kFloat16: static_cast<__half*>(ptr)[i] = from_float<__half>(v); break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(ptr)[i] = from_float<__nv_bfloat16>(v);
      break;
    default: static_cast<float*>(ptr)[i] = v;
  }
}

__device__ inline int64_t element(const Index& index, int64_t offset) {
  return index.wide ? static_cast<const int64_t*>(index.ptr)[offset]
                    : static_cast<const int32_t*>(index.ptr)[offset];
}

__device__ inline int64_t at(const Index& index, int64_t i) {
  return element(index, i * index.stride);
}

}  // namespace short_conv::cuda
