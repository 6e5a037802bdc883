// The CPU backend's interface, served by the CUDA kernels: the emulated variant's ops run on CPU
// tensors and go through the CUDA launchers.
#include <stdexcept>

#include "../../kernel_src/cpu/kernels.h"
#include "../../kernel_src/cuda/launch/launch.h"

namespace short_conv::cpu {
namespace {

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error("emulated launch failed");
}

}  // namespace

Work fwd_work(const FwdParams&) { return {1, 1}; }
void fwd_range(const FwdParams& p, int64_t, int64_t) { check(cuda::launch_fwd(p, nullptr)); }

Work update_work(const UpdateParams&) { return {1, 1}; }
void update_range(const UpdateParams& p, int64_t, int64_t) {
  check(cuda::launch_update(p, nullptr));
}

int64_t bwd_parts(const BwdParams& p) { return cuda::bwd_parts(p); }
Work bwd_work(const BwdParams&) { return {1, 1}; }
void bwd_range(const BwdParams& p, int64_t, int64_t) { check(cuda::launch_bwd(p, nullptr)); }
Work bwd_sum_work(const BwdParams&) { return {0, 1}; }  // launch_bwd did it
void bwd_sum_range(const BwdParams&, int64_t, int64_t) {}

const char* isa() { return "emulated"; }

}  // namespace short_conv::cpu
