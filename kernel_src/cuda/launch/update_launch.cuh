// Run-time problem -> update kernel instantiation and grid, for one x dtype.
#pragma once

#include "../device/update_kernel.cuh"
#include "config.h"
#include "grid.h"

namespace short_conv::cuda {

template <typename x_t, typename s_t, int kWidth, int kLen>
cudaError_t launch_update_rows(const UpdateParams& p, cudaStream_t stream) {
  using Io = VecIo<x_t, kUpdateLanes * sizeof(x_t)>;
  return launch(update_row_kernel<Io, s_t, kWidth, kLen, kUpdateThreads>,
                ceil_div(p.D, kUpdateThreads * Io::kLanes), p.N, kUpdateThreads, stream,
                RowUpdate(p));
}

template <typename x_t>
cudaError_t launch_update_channels(const UpdateParams& p, cudaStream_t stream) {
  return launch(update_kernel<x_t, kUpdateThreads>, ceil_div(p.D, kUpdateThreads), p.N,
                kUpdateThreads, stream, p);
}

template <typename x_t, typename s_t>
cudaError_t launch_update_state(const UpdateParams& p, cudaStream_t stream) {
  const bool whole = p.state.len == p.W;
  switch (p.W) {
    case 2:
      return whole ? launch_update_rows<x_t, s_t, 2, 2>(p, stream)
                   : launch_update_rows<x_t, s_t, 2, 1>(p, stream);
    case 3:
      return whole ? launch_update_rows<x_t, s_t, 3, 3>(p, stream)
                   : launch_update_rows<x_t, s_t, 3, 2>(p, stream);
    case 4:
      return whole ? launch_update_rows<x_t, s_t, 4, 4>(p, stream)
                   : launch_update_rows<x_t, s_t, 4, 3>(p, stream);
    case 7:
      return whole ? launch_update_rows<x_t, s_t, 7, 7>(p, stream)
                   : launch_update_rows<x_t, s_t, 7, 6>(p, stream);
    case 8:
      return whole ? launch_update_rows<x_t, s_t, 8, 8>(p, stream)
                   : launch_update_rows<x_t, s_t, 8, 7>(p, stream);
    default: return launch_update_channels<x_t>(p, stream);
  }
}

template <typename x_t>
cudaError_t launch_update_typed(const UpdateParams& p, cudaStream_t stream) {
  if (!update_by_rows(p)) return launch_update_channels<x_t>(p, stream);
  return p.state.dtype == DType::kFloat32 ? launch_update_state<x_t, float>(p, stream)
                                          : launch_update_state<x_t, x_t>(p, stream);
}

}  // namespace short_conv::cuda
