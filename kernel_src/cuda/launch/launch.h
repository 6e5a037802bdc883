// CUDA launchers, torch-free: what the host layer calls. Each returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include "../../params.h"

namespace short_conv::cuda {

cudaError_t launch_fwd(const FwdParams& p, cudaStream_t stream);
cudaError_t launch_update(const UpdateParams& p, cudaStream_t stream);

// How many parts the workspace must hold, by the problem and the current device.
int64_t bwd_parts(const BwdParams& p);
cudaError_t launch_bwd(const BwdParams& p, cudaStream_t stream);

}  // namespace short_conv::cuda
