// How a thread's channels move between memory and fp32 registers. Two ways, one interface:
// VecIo takes 16 bytes of neighbouring channels, StridedIo one channel at any stride.
#pragma once

#include "types.cuh"

namespace short_conv::cuda {

__device__ inline float& lane(float (&v)[1], int) { return v[0]; }

template <int kUnits>
__device__ float& lane(float2 (&v)[kUnits], int i) {
  return i % 2 ? v[i / 2].y : v[i / 2].x;
}

template <typename T>
struct StridedIo {
  using x_t = T;
  using Raw = T;
  using Unit = float;
  static constexpr int kUnits = 1;
  static constexpr int kLanes = 1;

  __device__ static Raw load(const x_t* ptr) { return *ptr; }
  __device__ static void unpack(Raw raw, Unit (&out)[kUnits]) { out[0] = to_float(raw); }
  __device__ static void store(x_t* ptr, const Unit (&v)[kUnits]) { *ptr = from_float<x_t>(v[0]); }
};

template <typename T>
struct VecIo {
  using x_t = T;
  using Raw = uint4;
  using Unit = float2;  // pairs, for the packed FMA of SM100
  static constexpr int kLanes = 16 / sizeof(T);
  static constexpr int kUnits = kLanes / 2;

  __device__ static Raw load(const x_t* ptr) { return __ldg(reinterpret_cast<const uint4*>(ptr)); }

  __device__ static void unpack(const Raw& raw, Unit (&out)[kUnits]) {
    const uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        out[i] = {__uint_as_float(word[2 * i]), __uint_as_float(word[2 * i + 1])};
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = unpack_pair(word[i]);
    }
  }

  __device__ static void store(x_t* ptr, const Unit (&v)[kUnits]) {
    uint32_t word[4];
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        word[2 * i] = __float_as_uint(v[i].x), word[2 * i + 1] = __float_as_uint(v[i].y);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) word[i] = pack_pair(v[i]);
    }
    *reinterpret_cast<uint4*>(ptr) = {word[0], word[1], word[2], word[3]};
  }

 private:
  __device__ static float2 unpack_pair(uint32_t word) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
    } else {
      return __half22float2(reinterpret_cast<const __half2&>(word));
    }
  }

  __device__ static uint32_t pack_pair(float2 v) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const __nv_bfloat162 pair = __float22bfloat162_rn(v);
      return reinterpret_cast<const uint32_t&>(pair);
    } else {
      const __half2 pair = __float22half2_rn(v);
      return reinterpret_cast<const uint32_t&>(pair);
    }
  }
};

// Element i of words loaded from a packed array of T.
template <typename T>
__device__ float element(const uint32_t* words, int i) {
  if constexpr (sizeof(T) == 4) {
    return __uint_as_float(words[i]);
  } else {
    const uint16_t bits = words[i / 2] >> (16 * (i % 2));
    return to_float(reinterpret_cast<const T&>(bits));
  }
}

// A thread's taps and bias in fp32. kExact: W is kWidth; else W <= kWidth and taps stand
// right-aligned, the first kWidth - W unused.
template <typename Io, int kWidth, bool kExact>
struct Taps {
  using Unit = typename Io::Unit;

  Unit w[kWidth][Io::kUnits];
  Unit bias[Io::kUnits];
  int first;  // first tap in use

  __device__ Taps(const FwdParams& p, int64_t c, bool packed)
      : Taps(p.weight, p.bias, p.W, c, packed) {}

  // packed: [D, W] contiguous and 16-byte aligned.
  __device__ Taps(const Weight& weight, const Bias& b, int W, int64_t c, bool packed)
      : first(kExact ? 0 : kWidth - W) {
    if (Io::kLanes > 1 && kExact && packed) {
      if (weight.dtype == DType::kFloat32) {
        load_packed<float>(weight, c);
      } else {
        load_packed<typename Io::x_t>(weight, c);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kWidth; ++k)
#pragma unroll
        for (int i = 0; i < Io::kLanes; ++i)
          lane(w[k], i) =
              k < first ? 0.0f
                        : load_as_float(weight.ptr,
                                        (c + i) * weight.stride_d + (k - first) * weight.stride_w,
                                        weight.dtype);
    }
#pragma unroll
    for (int i = 0; i < Io::kLanes; ++i)
      lane(bias, i) = b.ptr ? load_as_float(b.ptr, (c + i) * b.stride_d, b.dtype) : 0.0f;
  }

 private:
  template <typename w_t>
  __device__ void load_packed(const Weight& weight, int64_t c) {
    constexpr int kWords = Io::kLanes * kWidth * sizeof(w_t) / 4;
    const uint4* ptr = reinterpret_cast<const uint4*>(static_cast<const w_t*>(weight.ptr) +
                                                      c * kWidth);
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords / 4; ++i) {
      const uint4 raw = __ldg(ptr + i);
      words[4 * i] = raw.x, words[4 * i + 1] = raw.y;
      words[4 * i + 2] = raw.z, words[4 * i + 3] = raw.w;
    }
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
#pragma unroll
      for (int i = 0; i < Io::kLanes; ++i) lane(w[k], i) = element<w_t>(words, i * kWidth + k);
  }
};

}  // namespace short_conv::cuda
