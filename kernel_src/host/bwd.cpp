#include <initializer_list>

#include "../../torch-ext/torch_binding.h"
#include "run.h"
#include "tensors.h"

namespace short_conv {
namespace {

struct Argument {
  const char* name;
  OptionalTensor tensor;
};

// What is written shares no element with anything else of the call.
void check_written(std::initializer_list<Argument> written, std::initializer_list<Argument> read) {
  for (const Argument& to : written) {
    if (!to.tensor) continue;
    check_distinct(*to.tensor, to.name);
    for (const Argument& from : read)
      if (from.tensor) check_no_overlap(*to.tensor, to.name, *from.tensor, from.name);
    for (const Argument& other : written)
      if (&other != &to && other.tensor)
        check_no_overlap(*to.tensor, to.name, *other.tensor, other.name);
  }
}

// A gradient looks like what it is the gradient of, which therefore must be given.
bool wanted(const OptionalTensor& gradient, const char* name, const OptionalTensor& of,
            const char* of_name) {
  if (!gradient) return false;
  STD_TORCH_CHECK(of, name, " must come with ", of_name, ", got no ", of_name);
  check_like(*gradient, name, *of, of_name);
  return true;
}

BwdParams bwd_params(const Tensor& x, const Tensor& dy, const Tensor& weight,
                     const OptionalTensor& bias, const OptionalTensor& initial_state,
                     const OptionalTensor& dfinal_state, const OptionalTensor& cu_seqlens,
                     const OptionalTensor& seq_idx, const OptionalTensor& dx,
                     const OptionalTensor& dweight, const OptionalTensor& dbias,
                     const OptionalTensor& dinitial_state, bool silu) {
  BwdParams p = convolution_of<BwdParams>(x, weight, bias, cu_seqlens, seq_idx, silu);
  // The CUDA kernel counts the rows of a batch row in 32 bits.
  STD_TORCH_CHECK(x.is_cpu() || p.T < (int64_t{1} << 31) - 64,
                  "x must have T < 2^31 - 64 for a gradient on cuda, got T=", p.T);
  check_like(dy, "dy", x, "x");
  p.dy = rows_of(dy);
  if (initial_state)
    p.initial = state_of(*initial_state, "initial_state", x, p.dtype, p.N, p.D, p.W);
  if (dfinal_state) p.dfinal = state_of(*dfinal_state, "dfinal_state", x, p.dtype, p.N, p.D, p.W);

  if (wanted(dx, "dx", x, "x")) p.dx = rows_of(*dx);
  if (wanted(dweight, "dweight", weight, "weight"))
    p.dweight = {const_cast<void*>(dweight->const_data_ptr()), dweight->stride(0),
                 dweight->stride(1), p.weight.dtype};
  if (wanted(dbias, "dbias", bias, "bias"))
    p.dbias = {const_cast<void*>(dbias->const_data_ptr()), dbias->stride(0), 0, p.bias.dtype};
  if (wanted(dinitial_state, "dinitial_state", initial_state, "initial_state"))
    p.dinitial = state_of(*dinitial_state, "dinitial_state", x, p.dtype, p.N, p.D, p.W);
  check_written(
      {{"dx", dx}, {"dweight", dweight}, {"dbias", dbias}, {"dinitial_state", dinitial_state}},
      {{"x", x},
       {"dy", dy},
       {"weight", weight},
       {"bias", bias},
       {"initial_state", initial_state},
       {"dfinal_state", dfinal_state}});
  return p;
}

}  // namespace

void bwd(const Tensor& x, const Tensor& dy, const Tensor& weight, const OptionalTensor& bias,
         const OptionalTensor& initial_state, const OptionalTensor& dfinal_state,
         const OptionalTensor& cu_seqlens, const OptionalTensor& seq_idx, std::optional<Tensor> dx,
         std::optional<Tensor> dweight, std::optional<Tensor> dbias,
         std::optional<Tensor> dinitial_state, bool silu) {
  BwdParams p = bwd_params(x, dy, weight, bias, initial_state, dfinal_state, cu_seqlens, seq_idx,
                           dx, dweight, dbias, dinitial_state, silu);
  OptionalTensor workspace;
  if (dweight || dbias) {
    p.parts = bwd_parts(p, x);
    const ScalarType sums = p.dtype == DType::kFloat64 ? ScalarType::Double : ScalarType::Float;
    workspace = torch::stable::new_empty(x, {p.parts, p.W + 1, p.D}, sums);
    p.workspace = const_cast<void*>(workspace->const_data_ptr());
  }
  run(p, x);
}

}  // namespace short_conv
