// A one-dimensional launch that reports its own error.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>

namespace short_conv::cuda {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), int64_t blocks, int threads, cudaStream_t stream,
                   const Params&... params) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace short_conv::cuda
