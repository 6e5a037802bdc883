// A launch that reports its own error.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>

namespace short_conv::cuda {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// x: channel blocks. items run along y and, past its limit of 65535, along z.
template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), int64_t channel_blocks, int64_t items, int threads,
                   cudaStream_t stream, const Params&... params) {
  constexpr int64_t kMaxY = 65535;
  if (channel_blocks == 0 || items == 0) return cudaSuccess;
  const int64_t y = items < kMaxY ? items : kMaxY, z = ceil_div(items, y);
  if (z > kMaxY || channel_blocks > std::numeric_limits<int32_t>::max())
    return cudaErrorInvalidConfiguration;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(channel_blocks), static_cast<unsigned>(y),
                        static_cast<unsigned>(z));
  config.blockDim = dim3(threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace short_conv::cuda
