// Run-time problem -> bwd kernel instantiation and grid, for one x dtype.
#pragma once

#include "../device/bwd_kernel.cuh"
#include "../device/channel_first_bwd_kernel.cuh"
#include "config.h"
#include "grid.h"

namespace short_conv::cuda {

template <typename Io, int kWidth, bool kExact>
cudaError_t launch_bwd_rows(const BwdParams& p, int64_t part_rows, cudaStream_t stream) {
  return launch(bwd_kernel<Io, kWidth, kExact>,
                dim3(ceil_div(p.D, kBwdThreads * Io::kLanes), bwd_parts(p, part_rows)), kBwdThreads,
                stream, p, part_rows);
}

template <typename x_t, int kWidth, bool kExact>
cudaError_t launch_channel_first_bwd(const BwdParams& p, cudaStream_t stream) {
  return launch(channel_first_bwd_kernel<x_t, kWidth, kExact>,
                ceil_div(p.T, channel_first_rows(p.dtype)), p.B * p.D, kChannelFirstThreads, stream,
                p);
}

template <typename x_t>
cudaError_t launch_bwd_width(const BwdParams& p, int64_t part_rows, cudaStream_t stream) {
  using Io = VecIo<x_t, kFwdLanes * sizeof(x_t)>;
  if (bwd_channel_first(p))
    return p.W == kCommonWidth ? launch_channel_first_bwd<x_t, kCommonWidth, true>(p, stream)
                               : launch_channel_first_bwd<x_t, kMaxWidth, false>(p, stream);
  if (!bwd_vectorized(p))
    return launch_bwd_rows<StridedIo<x_t>, kMaxWidth, false>(p, part_rows, stream);
  if (p.W == kCommonWidth) return launch_bwd_rows<Io, kCommonWidth, true>(p, part_rows, stream);
  if constexpr (sizeof(x_t) == 2)
    if (p.W == 3) return launch_bwd_rows<Io, 3, true>(p, part_rows, stream);
  return launch_bwd_rows<Io, kMaxWidth, false>(p, part_rows, stream);
}

template <typename x_t>
cudaError_t launch_bwd_typed(const BwdParams& p, int64_t part_rows, cudaStream_t stream) {
  if (p.D == 0) return cudaSuccess;
  if (p.B * p.T > 0 && (p.dx.ptr || p.parts))
    if (const cudaError_t error = launch_bwd_width<x_t>(p, part_rows, stream); error != cudaSuccess)
      return error;
  if (p.dweight.ptr || p.dbias.ptr)
    if (const cudaError_t error =
            launch(bwd_sum_kernel<kBwdSumThreads>, dim3(ceil_div(p.D, kBwdSumThreads), p.W + 1),
                   kBwdSumThreads, stream, p);
        error != cudaSuccess)
      return error;
  if (!p.dinitial.ptr) return cudaSuccess;
  return launch(bwd_state_kernel<x_t, kBwdSumThreads>, ceil_div(p.D, kBwdSumThreads), p.N,
                kBwdSumThreads, stream, p);
}

}  // namespace short_conv::cuda
