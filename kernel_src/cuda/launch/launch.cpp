#include "launch.h"

#include "inst.h"

namespace short_conv::cuda {

cudaError_t launch_fwd(const FwdParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat32: return launch_fwd_f32(p, stream);
    case DType::kFloat16: return launch_fwd_f16(p, stream);
    case DType::kBFloat16: return launch_fwd_bf16(p, stream);
    default: return cudaErrorNotSupported;
  }
}

cudaError_t launch_update(const UpdateParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat32: return launch_update_f32(p, stream);
    case DType::kFloat16: return launch_update_f16(p, stream);
    case DType::kBFloat16: return launch_update_bf16(p, stream);
    default: return cudaErrorNotSupported;
  }
}

}  // namespace short_conv::cuda
