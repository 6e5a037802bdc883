#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace short_conv {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// One host function per op (kernel_src/host): it checks, and runs on x's device.
void fwd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
         const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
         const OptionalTensor& seq_idx, const OptionalTensor& state_indices,
         const OptionalTensor& has_initial_state, Tensor out, std::optional<Tensor> final_state,
         bool silu);

void bwd(const Tensor& x, const Tensor& dy, const Tensor& weight, const OptionalTensor& bias,
         const OptionalTensor& initial_state, const OptionalTensor& dfinal_state,
         const OptionalTensor& cu_seqlens, const OptionalTensor& seq_idx, std::optional<Tensor> dx,
         std::optional<Tensor> dweight, std::optional<Tensor> dbias,
         std::optional<Tensor> dinitial_state, bool silu);

void update(const Tensor& x, Tensor conv_state, const Tensor& weight, const OptionalTensor& bias,
            const OptionalTensor& cache_seqlens, const OptionalTensor& conv_state_indices,
            const OptionalTensor& cu_seqlens, const OptionalTensor& num_accepted_tokens, Tensor out,
            bool silu);

void states(const Tensor& x, const Tensor& cu_seqlens, Tensor final_state);

}  // namespace short_conv
