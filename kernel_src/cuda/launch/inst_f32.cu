// The kernels for x in float, in a file of their own so that dtypes compile in parallel.
#include "bwd_launch.cuh"
#include "fwd_launch.cuh"
#include "inst.h"
#include "update_launch.cuh"

namespace short_conv::cuda {

cudaError_t launch_fwd_f32(const FwdParams& p, cudaStream_t stream) {
  return launch_fwd_typed<float>(p, stream);
}

cudaError_t launch_update_f32(const UpdateParams& p, cudaStream_t stream) {
  return launch_update_typed<float>(p, stream);
}

cudaError_t launch_bwd_f32(const BwdParams& p, int64_t part_rows, cudaStream_t stream) {
  return launch_bwd_typed<float>(p, part_rows, stream);
}

}  // namespace short_conv::cuda
