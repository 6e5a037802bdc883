#include "torch_binding.h"

#include <torch/csrc/stable/library.h>

#include "registration.h"

STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "fwd(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens,"
      " Tensor? seq_idx, Tensor? state_indices, Tensor? has_initial_state, Tensor(a!) out,"
      " Tensor(b!)? final_state, bool silu) -> ()");
  ops.def(
      "bwd(Tensor x, Tensor dy, Tensor weight, Tensor? bias, Tensor? initial_state,"
      " Tensor? dfinal_state, Tensor? cu_seqlens, Tensor? seq_idx, Tensor(a!)? dx,"
      " Tensor(b!)? dweight, Tensor(c!)? dbias, Tensor(d!)? dinitial_state, bool silu) -> ()");
  ops.def(
      "update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias,"
      " Tensor? cache_seqlens, Tensor? conv_state_indices, Tensor? cu_seqlens,"
      " Tensor? num_accepted_tokens, Tensor(b!) out, bool silu) -> ()");
  ops.def("states(Tensor x, Tensor cu_seqlens, Tensor(a!) final_state) -> ()");
}

// One host function serves both keys: it picks the backend by x.
template <typename Library>
static void implement(Library& ops) {
  ops.impl("fwd", TORCH_BOX(&short_conv::fwd));
  ops.impl("bwd", TORCH_BOX(&short_conv::bwd));
  ops.impl("update", TORCH_BOX(&short_conv::update));
  ops.impl("states", TORCH_BOX(&short_conv::states));
}

STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CPU, ops) { implement(ops); }

#ifdef CUDA_KERNEL
STABLE_TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME, CUDA, ops) { implement(ops); }
#endif

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
