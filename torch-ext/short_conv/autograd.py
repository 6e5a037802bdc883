"""Gradients of `causal_conv1d`, by the op `bwd`."""

from __future__ import annotations

import torch
from torch import Tensor

from . import calls


class Convolution(torch.autograd.Function):
    """(y, final state or None) of the same op that runs without gradients, hence the same bits.

    No setup_context: torch binds arguments by inspect.signature for it, 60 us a call.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        seq_idx: Tensor | None,
        return_final_state: bool,
        state_len: int | None,
        silu: bool,
    ) -> tuple[Tensor, Tensor | None]:
        out, final_state = torch.empty_like(x), None
        if return_final_state:
            final_state = calls.new_state(x, weight, cu_seqlens, state_len, initial_state)
        calls.call(calls.fwd, x, weight, bias, initial_state, cu_seqlens, seq_idx, None, None, out,
                   final_state, silu)  # fmt: skip
        ctx.save_for_backward(x, weight, bias, initial_state, cu_seqlens, seq_idx)
        ctx.set_materialize_grads(False)
        if return_final_state and not (ctx.needs_input_grad[0] or ctx.needs_input_grad[3]):
            ctx.mark_non_differentiable(final_state)  # it holds inputs, of which none is asked for
        ctx.silu = silu
        return out, final_state

    @staticmethod
    def backward(ctx, dy: Tensor | None, dfinal_state: Tensor | None):
        x, weight, bias, initial_state, cu_seqlens, seq_idx = ctx.saved_tensors
        if dy is None:
            dy = x.new_zeros(()).expand(x.shape)
        # Under create_graph, a node that says what cannot follow; without it, 20 us less.
        compute = _Gradients.apply if torch.is_grad_enabled() else gradients
        found = compute(
            x, dy, weight, bias, initial_state, dfinal_state, cu_seqlens, seq_idx,
            ctx.needs_input_grad[:4], ctx.silu,
        )  # fmt: skip
        return *found, None, None, None, None, None


def gradients(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    dfinal_state: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    needed: tuple[bool, bool, bool, bool],
    silu: bool,
) -> tuple[Tensor | None, ...]:
    """Of x, weight, bias and initial_state, None where not needed."""
    made = [
        torch.empty_like(tensor) if need else None
        for tensor, need in zip((x, weight, bias, initial_state), needed, strict=True)
    ]
    calls.call(calls.bwd, x, dy, weight, bias, initial_state, dfinal_state, cu_seqlens, seq_idx,
               *made, silu)  # fmt: skip
    return tuple(made)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        return gradients(*args)

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError(
            "causal_conv1d must be differentiated once: its backward has no backward, "
            "got a gradient of a gradient"
        )
