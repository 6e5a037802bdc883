// Just enough CUDA on the host to run the kernels: every block of a launch runs in turn, and so do
// its threads, or with EMULATED_WARPS each is a host thread and warps can meet. It proves the
// kernels' logic where there is no GPU, not their speed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidConfiguration, cudaErrorNotSupported };

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
// Enough for several parts of small problems.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 4;
  return cudaSuccess;
}

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream = nullptr;
};

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

inline thread_local dim3 gridDim, blockIdx, threadIdx;

#ifdef EMULATED_WARPS
#include "warps.h"
#else
#define __shared__ static thread_local

template <typename Kernel>
void run_block(unsigned threads, const Kernel& kernel) {
  for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel();
}
#endif

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               const Args&... args) {
  gridDim = config->gridDim;
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
        run_block(config->blockDim.x, [&] { kernel(args...); });
  return cudaSuccess;
}

struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

// Misaligned vector accesses fault on a GPU; here they abort.
template <typename T>
T __ldg(const T* ptr) {
  if (reinterpret_cast<uintptr_t>(ptr) % alignof(T)) __builtin_trap();
  return *ptr;
}

inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
inline float __uint_as_float(uint32_t bits) {
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
inline uint32_t __float_as_uint(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}
