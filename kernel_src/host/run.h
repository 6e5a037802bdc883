// Where a filled parameter struct meets a backend: torch's thread pool, or the caller's stream.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "../cpu/kernels.h"
#include "checks.h"

#ifdef CUDA_KERNEL
#include <torch/csrc/stable/accelerator.h>

#include "../cuda/launch/launch.h"

// Weak, so that the CUDA variant also loads where torch has no CUDA and serves its CPU road there.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace short_conv {

template <typename Params, typename Range>
void run_on_cpu(const Params& p, cpu::Work work, Range range) {
  if (work.items == 0) return;
  torch::stable::parallel_for(0, work.items, work.grain,
                              [&](int64_t begin, int64_t end) { range(p, begin, end); });
}

#ifdef CUDA_KERNEL
template <typename Params, typename Launch>
void run_on_cuda(const Params& p, int32_t device, Launch launch) {
  torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const cudaError_t error = launch(p, static_cast<cudaStream_t>(stream));
  STD_TORCH_CHECK(error == cudaSuccess, "CUDA launch failed: ", cudaGetErrorString(error));
}
#endif

// On x's device, where the checks have found every other tensor too.
inline void run(const FwdParams& p, const Tensor& x) {
#ifdef CUDA_KERNEL
  if (!x.is_cpu()) return run_on_cuda(p, x.get_device_index(), cuda::launch_fwd);
#endif
  run_on_cpu(p, cpu::fwd_work(p), cpu::fwd_range);
}

inline void run(const UpdateParams& p, const Tensor& x) {
#ifdef CUDA_KERNEL
  if (!x.is_cpu()) return run_on_cuda(p, x.get_device_index(), cuda::launch_update);
#endif
  run_on_cpu(p, cpu::update_work(p), cpu::update_range);
}

inline int64_t bwd_parts(const BwdParams& p, const Tensor& x) {
#ifdef CUDA_KERNEL
  if (!x.is_cpu()) {
    torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
    return cuda::bwd_parts(p);
  }
#endif
  return cpu::bwd_parts(p);
}

inline void run(const BwdParams& p, const Tensor& x) {
#ifdef CUDA_KERNEL
  if (!x.is_cpu()) return run_on_cuda(p, x.get_device_index(), cuda::launch_bwd);
#endif
  run_on_cpu(p, cpu::bwd_work(p), cpu::bwd_range);
  run_on_cpu(p, cpu::bwd_sum_work(p), cpu::bwd_sum_range);
}

}  // namespace short_conv
