#include "torch_binding.h"

#include <torch/csrc/stable/library.h>

#include "registration.h"

STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "fwd(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens,"
      " Tensor? seq_idx, Tensor? state_indices, Tensor? has_initial_state, Tensor(a!) out,"
      " Tensor(b!)? final_state, bool silu) -> ()");
  ops.def(
      "update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias,"
      " Tensor? cache_seqlens, Tensor? conv_state_indices, Tensor? cu_seqlens,"
      " Tensor? num_accepted_tokens, Tensor(b!) out, bool silu) -> ()");
  ops.def("states(Tensor x, Tensor cu_seqlens, Tensor(a!) final_state) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("fwd", TORCH_BOX(&short_conv::fwd_cpu));
  ops.impl("update", TORCH_BOX(&short_conv::update_cpu));
  ops.impl("states", TORCH_BOX(&short_conv::states_cpu));
}

#ifdef CUDA_KERNEL
STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("fwd", TORCH_BOX(&short_conv::fwd_cuda));
  ops.impl("update", TORCH_BOX(&short_conv::update_cuda));
  ops.impl("states", TORCH_BOX(&short_conv::states_cuda));
}
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
