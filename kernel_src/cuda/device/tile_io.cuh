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

__device__ inline void to_words(const uint4& raw, uint32_t* word) {
  word[0] = raw.x, word[1] = raw.y, word[2] = raw.z, word[3] = raw.w;
}
__device__ inline void to_words(const uint2& raw, uint32_t* word) {
  word[0] = raw.x, word[1] = raw.y;
}
__device__ inline void to_words(uint32_t raw, uint32_t* word) { word[0] = raw; }

template <int kBytes>
using VecAccess = std::conditional_t<kBytes % 16 == 0, uint4,
                                     std::conditional_t<kBytes % 8 == 0, uint2, uint32_t>>;

template <int kBytes>
__device__ VecAccess<kBytes> from_words(const uint32_t* word) {
  if constexpr (kBytes == 16) {
    return {word[0], word[1], word[2], word[3]};
  } else if constexpr (kBytes == 8) {
    return {word[0], word[1]};
  } else {
    return word[0];
  }
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

template <typename T, int kBytes = 16>
struct VecIo {
  static_assert(kBytes == 16 || kBytes == 8 || kBytes == 4, "one vector access a row");
  using x_t = T;
  using Raw = VecAccess<kBytes>;
  using Unit = float2;  // pairs, for the packed FMA of SM100
  static constexpr int kLanes = kBytes / sizeof(T);
  static constexpr int kUnits = kLanes / 2;

  __device__ static Raw load(const x_t* ptr) { return __ldg(reinterpret_cast<const Raw*>(ptr)); }

  __device__ static void unpack(const Raw& raw, Unit (&out)[kUnits]) {
    uint32_t word[kBytes / 4];
    to_words(raw, word);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if constexpr (sizeof(T) == 4) {
        out[i] = {__uint_as_float(word[2 * i]), __uint_as_float(word[2 * i + 1])};
      } else {
        out[i] = unpack_pair(word[i]);
      }
    }
  }

  __device__ static void store(x_t* ptr, const Unit (&v)[kUnits]) {
    uint32_t word[kBytes / 4];
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if constexpr (sizeof(T) == 4) {
        word[2 * i] = __float_as_uint(v[i].x), word[2 * i + 1] = __float_as_uint(v[i].y);
      } else {
        word[i] = pack_pair(v[i]);
      }
    }
    *reinterpret_cast<Raw*>(ptr) = from_words<kBytes>(word);
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

// What taps and bias are multiplied by when SiLU follows; see silu() in math.cuh.
template <typename x_t>
constexpr float kSiluScale = sizeof(x_t) == 4 ? 1.0f : -1.4426950408889634f;

// A thread's taps and bias in fp32. kExact: W is kWidth; else W <= kWidth and taps stand
// right-aligned, the first kWidth - W unused.
template <typename Io, int kWidth, bool kExact>
struct Taps {
  using Unit = typename Io::Unit;

  Unit w[kWidth][Io::kUnits];
  Unit bias[Io::kUnits];
  int first;  // first tap in use

  // Vector I/O with exact width takes [D, W] contiguous and 16-byte aligned, as the launcher
  // makes sure.
  __device__ Taps(const Weight& weight, const Bias& b, int W, bool silu, int64_t c)
      : first(kExact ? 0 : kWidth - W) {
    if (weight.dtype == DType::kFloat32) {
      load<float>(weight, c);
    } else {
      load<typename Io::x_t>(weight, c);
    }
#pragma unroll
    for (int i = 0; i < Io::kLanes; ++i) lane(bias, i) = 0.0f;
    if (b.ptr) {
#pragma unroll
      for (int i = 0; i < Io::kLanes; ++i)
        lane(bias, i) = load_as_float(b.ptr, (c + i) * b.stride_d, b.dtype);
    }
    if (silu && kSiluScale<typename Io::x_t> != 1.0f) {
#pragma unroll
      for (int i = 0; i < Io::kLanes; ++i) {
        lane(bias, i) *= kSiluScale<typename Io::x_t>;
#pragma unroll
        for (int k = 0; k < kWidth; ++k) lane(w[k], i) *= kSiluScale<typename Io::x_t>;
      }
    }
  }

 private:
  template <typename w_t>
  __device__ void load(const Weight& weight, int64_t c) {
    if constexpr (kExact && Io::kLanes > 1) {
      load_packed<w_t>(weight, c);
    } else {
      const w_t* ptr = static_cast<const w_t*>(weight.ptr) + c * weight.stride_d;
#pragma unroll
      for (int i = 0; i < Io::kLanes; ++i, ptr += weight.stride_d)
#pragma unroll
        for (int k = 0; k < kWidth; ++k)
          lane(w[k], i) = k < first ? 0.0f : to_float(ptr[(k - first) * weight.stride_w]);
    }
  }

  template <typename w_t>
  __device__ void load_packed(const Weight& weight, int64_t c) {
    constexpr int kWords = Io::kLanes * kWidth * sizeof(w_t) / 4;
    using Access = VecAccess<kWords * 4>;
    constexpr int kStep = sizeof(Access) / 4;
    const auto* ptr =
        reinterpret_cast<const Access*>(static_cast<const w_t*>(weight.ptr) + c * kWidth);
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords / kStep; ++i) to_words(__ldg(ptr + i), words + i * kStep);
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
#pragma unroll
      for (int i = 0; i < Io::kLanes; ++i) lane(w[k], i) = element<w_t>(words, i * kWidth + k);
  }
};

}  // namespace short_conv::cuda
