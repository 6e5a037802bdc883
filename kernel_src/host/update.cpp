#include "../../torch-ext/torch_binding.h"
#include "run.h"
#include "tensors.h"

namespace short_conv {
namespace {

UpdateParams update_params(const Tensor& x, const Tensor& conv_state, const Tensor& weight,
                           const OptionalTensor& bias, const OptionalTensor& cache_seqlens,
                           const OptionalTensor& conv_state_indices,
                           const OptionalTensor& cu_seqlens,
                           const OptionalTensor& num_accepted_tokens, const Tensor& out,
                           bool silu) {
  UpdateParams p{};
  const int64_t dim = x.dim();
  if (cu_seqlens) {
    STD_TORCH_CHECK(dim == 2, "x must be [T_total, D] when cu_seqlens is given, got ", shape_of(x));
    p.B = 1, p.T = x.size(0), p.D = x.size(1);
  } else {
    STD_TORCH_CHECK(dim == 2 || dim == 3, "x must be [B, D] or [B, D, T], got ", shape_of(x));
    p.B = x.size(0), p.D = x.size(1), p.T = dim == 3 ? x.size(2) : 1;
  }
  p.silu = silu;
  p.dtype = check_dtype(x, "x", x.is_cpu());
  check_out(out, x);
  const bool varlen = cu_seqlens.has_value();
  auto rows_of = [&](const Tensor& t) {
    void* ptr = const_cast<void*>(t.const_data_ptr());
    return varlen ? Rows{ptr, 0, t.stride(0), t.stride(1)}
                  : Rows{ptr, t.stride(0), dim == 3 ? t.stride(2) : 0, t.stride(1)};
  };
  p.x = rows_of(x), p.y = rows_of(out);
  p.weight = weight_of(weight, x, p.dtype, p.D);
  p.W = static_cast<int32_t>(weight.size(1));
  p.bias = bias_of(bias, x, p.dtype, p.D);
  p.N = p.B;
  if (cu_seqlens) std::tie(p.cu_seqlens, p.N) = offsets_of(*cu_seqlens, x);

  p.state = state_of(conv_state, "conv_state", x, p.dtype, conv_state_indices ? -1 : p.N, p.D, p.W);
  check_distinct(conv_state, "conv_state");
  check_no_overlap(conv_state, "conv_state", x, "x");
  check_no_overlap(out, "out", conv_state, "conv_state");
  STD_TORCH_CHECK(!cache_seqlens || !num_accepted_tokens,
                  "cache_seqlens and num_accepted_tokens must not both be given, got both");
  STD_TORCH_CHECK(!cache_seqlens || p.state.len > 0,
                  "conv_state must have L >= 1 when cache_seqlens is given, got L=0");
  p.slots = index_of(conv_state_indices, "conv_state_indices", x, p.N);
  p.circular = index_of(cache_seqlens, "cache_seqlens", x, p.N);
  p.accepted = index_of(num_accepted_tokens, "num_accepted_tokens", x, p.N);
  return p;
}

}  // namespace

void update(const Tensor& x, Tensor conv_state, const Tensor& weight, const OptionalTensor& bias,
            const OptionalTensor& cache_seqlens, const OptionalTensor& conv_state_indices,
            const OptionalTensor& cu_seqlens, const OptionalTensor& num_accepted_tokens, Tensor out,
            bool silu) {
  run(update_params(x, conv_state, weight, bias, cache_seqlens, conv_state_indices, cu_seqlens,
                    num_accepted_tokens, out, silu),
      x);
}

}  // namespace short_conv
