#include "../../torch-ext/torch_binding.h"
#include "run.h"
#include "tensors.h"

namespace short_conv {
namespace {

FwdParams fwd_params(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                     const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
                     const OptionalTensor& seq_idx, const OptionalTensor& state_indices,
                     const OptionalTensor& has_initial_state, const Tensor& out,
                     const OptionalTensor& final_state, bool silu) {
  FwdParams p = convolution_of<FwdParams>(x, weight, bias, cu_seqlens, seq_idx, silu);
  check_out(out, x);
  p.y = rows_of(out);
  p.slots = index_of(state_indices, "state_indices", x, p.N);
  const int64_t count = state_indices ? -1 : p.N;
  if (initial_state)
    p.initial = state_of(*initial_state, "initial_state", x, p.dtype, count, p.D, p.W);
  if (final_state) {
    p.final = state_of(*final_state, "final_state", x, p.dtype, count, p.D, p.W);
    check_distinct(*final_state, "final_state");
    check_no_overlap(*final_state, "final_state", x, "x");
    check_no_overlap(out, "out", *final_state, "final_state");
    if (initial_state && !same_storage(*initial_state, *final_state))
      check_no_overlap(*final_state, "final_state", *initial_state,
                       "initial_state unless it is the very same view");
  }
  STD_TORCH_CHECK(
      !state_indices || !initial_state || !final_state || p.initial.count == p.final.count,
      "initial_state and final_state must have the same number of slots, got ", p.initial.count,
      " and ", p.final.count);
  if (initial_state) check_no_overlap(out, "out", *initial_state, "initial_state");
  if (has_initial_state) {
    check_shape(*has_initial_state, "has_initial_state", "[N]", {p.N});
    check_device(*has_initial_state, "has_initial_state", x);
    STD_TORCH_CHECK(has_initial_state->scalar_type() == ScalarType::Bool,
                    "has_initial_state must be bool, got ScalarType ",
                    static_cast<int>(has_initial_state->scalar_type()));
    p.has_initial = static_cast<const uint8_t*>(has_initial_state->const_data_ptr());
    p.has_initial_stride = has_initial_state->stride(0);
  }
  return p;
}

FwdParams states_params(const Tensor& x, const Tensor& cu_seqlens, const Tensor& final_state) {
  STD_TORCH_CHECK(x.dim() == 2, "x must be [T, D], got ", shape_of(x));
  FwdParams p{};
  p.B = 1, p.T = x.size(0), p.D = x.size(1), p.W = 1;
  p.dtype = check_dtype(x, "x", x.is_cpu());
  p.x = {const_cast<void*>(x.const_data_ptr()), 0, x.stride(0), x.stride(1)};
  std::tie(p.cu_seqlens, p.N) = offsets_of(cu_seqlens, x);
  p.final = state_of(final_state, "final_state", x, p.dtype, p.N, p.D, p.W);
  check_distinct(final_state, "final_state");
  check_no_overlap(final_state, "final_state", x, "x");
  return p;
}

}  // namespace

void fwd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
         const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
         const OptionalTensor& seq_idx, const OptionalTensor& state_indices,
         const OptionalTensor& has_initial_state, Tensor out, std::optional<Tensor> final_state,
         bool silu) {
  run(fwd_params(x, weight, bias, initial_state, cu_seqlens, seq_idx, state_indices,
                 has_initial_state, out, final_state, silu),
      x);
}

void states(const Tensor& x, const Tensor& cu_seqlens, Tensor final_state) {
  run(states_params(x, cu_seqlens, final_state), x);
}

}  // namespace short_conv
