// The kernels for x in __half, in a file of their own so that dtypes compile in parallel.
#include "bwd_launch.cuh"
#include "fwd_launch.cuh"
#include "inst.h"
#include "update_launch.cuh"

namespace short_conv::cuda {

cudaError_t launch_fwd_f16(const FwdParams& p, cudaStream_t stream) {
  return launch_fwd_typed<__half>(p, stream);
}

cudaError_t launch_update_f16(const UpdateParams& p, cudaStream_t stream) {
  return launch_update_typed<__half>(p, stream);
}

cudaError_t launch_bwd_f16(const BwdParams& p, int64_t part_rows, cudaStream_t stream) {
  return launch_bwd_typed<__half>(p, part_rows, stream);
}

}  // namespace short_conv::cuda
