#include "launch.h"

#include "config.h"
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

static int64_t part_rows_of(const BwdParams& p) {
  int device = 0, processors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  return bwd_part_rows(p, processors);
}

int64_t bwd_parts(const BwdParams& p) { return bwd_parts(p, part_rows_of(p)); }

cudaError_t launch_bwd(const BwdParams& p, cudaStream_t stream) {
  switch (p.dtype) {
    case DType::kFloat32: return launch_bwd_f32(p, part_rows_of(p), stream);
    case DType::kFloat16: return launch_bwd_f16(p, part_rows_of(p), stream);
    case DType::kBFloat16: return launch_bwd_bf16(p, part_rows_of(p), stream);
    default: return cudaErrorNotSupported;
  }
}

}  // namespace short_conv::cuda
