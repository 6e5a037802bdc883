#pragma once

#include "cuda_runtime_api.h"

using __half = _Float16;

struct alignas(4) __half2 {
  __half x, y;
};

inline float __half2float(__half v) { return static_cast<float>(v); }
inline __half __float2half_rn(float v) { return static_cast<__half>(v); }
inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }
inline __half2 __float22half2_rn(float2 v) { return {__float2half_rn(v.x), __float2half_rn(v.y)}; }
