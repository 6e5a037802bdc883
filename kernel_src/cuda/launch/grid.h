// A launch that reports its own error.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>

#include "config.h"

namespace short_conv::cuda {

constexpr int64_t kMaxGridY = 65535;  // and z

template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), dim3 blocks, int threads, cudaStream_t stream,
                   const Params&... params) {
  if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0) return cudaSuccess;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

// x: channel blocks. items run along y and, past its limit, along z.
template <typename... Params>
cudaError_t launch(void (*kernel)(Params...), int64_t channel_blocks, int64_t items, int threads,
                   cudaStream_t stream, const Params&... params) {
  if (channel_blocks == 0 || items == 0) return cudaSuccess;
  const int64_t y = items < kMaxGridY ? items : kMaxGridY, z = ceil_div(items, y);
  if (z > kMaxGridY || channel_blocks > std::numeric_limits<int32_t>::max())
    return cudaErrorInvalidConfiguration;
  return launch(kernel, dim3(channel_blocks, y, z), threads, stream, params...);
}

}  // namespace short_conv::cuda
