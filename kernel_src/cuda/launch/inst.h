// One launcher per x dtype, each defined in its own inst_*.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "../../params.h"

namespace short_conv::cuda {

cudaError_t launch_fwd_f32(const FwdParams& p, cudaStream_t stream);
cudaError_t launch_fwd_f16(const FwdParams& p, cudaStream_t stream);
cudaError_t launch_fwd_bf16(const FwdParams& p, cudaStream_t stream);

cudaError_t launch_update_f32(const UpdateParams& p, cudaStream_t stream);
cudaError_t launch_update_f16(const UpdateParams& p, cudaStream_t stream);
cudaError_t launch_update_bf16(const UpdateParams& p, cudaStream_t stream);

cudaError_t launch_bwd_f32(const BwdParams& p, int64_t part_rows, cudaStream_t stream);
cudaError_t launch_bwd_f16(const BwdParams& p, int64_t part_rows, cudaStream_t stream);
cudaError_t launch_bwd_bf16(const BwdParams& p, int64_t part_rows, cudaStream_t stream);

}  // namespace short_conv::cuda
