"""The public operations. Host time per call is a bar here: Python allocates, calls one op, and
asks the contract for reasons only when the op has refused."""

from __future__ import annotations

import torch
from torch import Tensor

from . import calls, contract
from .autograd import Convolution


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    return_final_state: bool = False,
    state_len: int | None = None,
    final_state_out: Tensor | None = None,
    out: Tensor | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal depthwise convolution of whole sequences, dense or packed, with states.

    y[t] = act(bias + sum_k weight[:, k] * x[t - (W-1) + k]) within each sequence, accumulated in
    fp32 (fp64 for fp64) and rounded once.

    Args:
        x: [B, T, D] bf16, fp16 or fp32 (fp64 on CPU), any strides; unit stride along D is fast.
            With cu_seqlens the B*T rows are one packed row and must be viewable as such.
        weight: [D, W], W from 1 to 8, oldest tap first, x's dtype or fp32.
        bias: [D], x's dtype or fp32.
        activation: None, "silu" or "swish".
        initial_state: [N, D, L], L >= W-1, bf16, fp16 or fp32 whatever x is: raw inputs oldest to
            newest, of which the last W-1 columns are the history. Not modified unless it is also
            final_state_out. N is B, or the number of packed sequences.
        cu_seqlens: [N + 1] int32 or int64, sequence n is rows [cu[n], cu[n+1]); rows past the last
            get y = 0. Not together with seq_idx.
        seq_idx: [B, T] int32 or int64, not decreasing along T; rows below 0 are padding with y = 0.
            N is B: the initial state continues a row's first sequence, the final state is its
            last one's.
        return_final_state: also return the state after the call.
        state_len: columns of a final state allocated here, default W.
        final_state_out: [N, D, L'] to be written; may be the very view that initial_state is.
        out: y's buffer, x's shape and dtype, no overlap with x.
        state_indices: [N] slots: states are then pools [S, D, L] and sequence n uses row
            state_indices[n]. A slot outside [0, S) is a padding sequence: y = 0, nothing touched.
            Slots must not repeat. Without final_state_out the initial pool is advanced in place
            when return_final_state is set. Needs a pool.
        has_initial_state: [N] bool; False starts sequence n from zeros whatever its state holds.
            Needs initial_state.

    Returns:
        y with x's shape, dtype and layout family, or (y, final state).

    Raises:
        TypeError, ValueError: an argument breaks a rule; the text has argument, rule, got-value.
        NotImplementedError: no kernel for it (fp64 on CUDA, other devices, second derivatives,
            torch.func transforms, forward mode; with gradients: out, final_state_out,
            state_indices, has_initial_state).

    Differentiable in x, weight, bias and every column of initial_state, from y and from every
    column of a returned final state; y has the bits of a call without gradients. Sums over rows
    run in a fixed order, so gradients have the same bits every time. Padding rows get zeros and
    contribute nothing. A program from torch.export holds the forward op alone, without gradients.
    """
    silu = contract.activation(activation)
    contract.is_tensor("x", x)
    contract.is_tensor("weight", weight)
    if initial_state is None and (state_indices is not None or has_initial_state is not None):
        contract.needs_state(state_indices, has_initial_state, final_state_out)
    rows, given = x, out
    if cu_seqlens is not None and x.dim() == 3 and x.shape[0] != 1:
        rows = _flattened("x", x)
        out = None if out is None else _flattened("out", out)
    if contract.is_differentiated(x, weight, bias, initial_state):
        contract.reverse_mode(x=x, weight=weight, bias=bias, initial_state=initial_state)
        contract.inference_options(
            out=out, final_state_out=final_state_out, state_indices=state_indices,
            has_initial_state=has_initial_state,
        )  # fmt: skip
        out, final_state = Convolution.apply(rows, weight, bias, initial_state, cu_seqlens, seq_idx,
                                             return_final_state, state_len, silu)  # fmt: skip
    else:
        if out is None:
            out = torch.empty_like(rows)
        final_state = final_state_out
        if final_state is None and return_final_state:
            if state_indices is not None and initial_state is not None:
                final_state = initial_state
            else:
                final_state = calls.new_state(rows, weight, cu_seqlens, state_len, initial_state)
        calls.call(calls.fwd, rows, weight, bias, initial_state, cu_seqlens, seq_idx, state_indices,
                   has_initial_state, out, final_state, silu)  # fmt: skip
    y = given if given is not None else out.view(x.shape) if rows is not x else out
    return (y, final_state) if return_final_state else y


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decode: each sequence consumes its new tokens and its conv_state row advances in place.
    For inference: arguments that require gradients are refused.

    y as in `causal_conv1d`, with the history taken from conv_state.

    Args:
        x: [B, D], [B, D, T] for several tokens each, or [T_total, D] with cu_seqlens; bf16, fp16 or
            fp32 (fp64 on CPU), any strides.
        conv_state: [S, D, L], L >= W-1, any strides, bf16, fp16 or fp32 whatever x is. Modified:
            afterwards all L columns hold the last L inputs. S is B unless slots are given.
        weight, bias, activation: as in `causal_conv1d`.
        cache_seqlens: [N]; conv_state is then a circular buffer: token t of row n goes to column
            (cache_seqlens[n] + t) mod L and the history is the W-1 columns before it.
        conv_state_indices: [N] slots; one outside [0, S) is a padding row: y = 0, nothing touched.
            Slots must not repeat.
        cu_seqlens: [N + 1]; sequence n is rows [cu[n], cu[n+1]) of x. Rows of no sequence are 0,
            or what `out` held. A sequence of no tokens leaves its state as it is.
        num_accepted_tokens: [N], for speculative decoding with L = W-1 + K columns: the history
            starts at column a = clamp(num_accepted_tokens[n], 0, K), the one that stood after a of
            the K tokens of the previous call; all later columns are forgotten. Pass K after a
            prefill, and K - T + a after a call of T < K tokens. a = 0 is the history from before
            the previous call.
        out: y's buffer, x's shape and dtype, no overlap with x.

    Returns:
        y shaped like x.

    Raises:
        TypeError, ValueError, NotImplementedError: as `causal_conv1d`.
    """
    silu = contract.activation(activation)
    contract.is_tensor("x", x)
    contract.is_tensor("weight", weight)
    if contract.is_differentiated(x, conv_state, weight, bias):
        contract.no_gradients(x=x, conv_state=conv_state, weight=weight, bias=bias)
    if out is None:
        out = torch.zeros_like(x) if cu_seqlens is not None else torch.empty_like(x)
    calls.call(calls.update, x, conv_state, weight, bias, cache_seqlens, conv_state_indices,
               cu_seqlens, num_accepted_tokens, out, silu)  # fmt: skip
    return out


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`causal_conv1d` under the signature of causal-conv1d 1.7: channels before time.

    Args:
        x: [B, D, T]; a transposed [B, T, D] tensor is the fast layout.
        weight, bias, activation, seq_idx, cu_seqlens: as in `causal_conv1d`.
        initial_states: [N, D, W-1].
        final_states_out: [N, D, W-1], written and returned when return_final_states is set.

    Returns:
        y [B, D, T] in x's layout, or (y, final states [N, D, W-1]). Differentiable likewise.

    Raises:
        As `causal_conv1d`; TypeError for an activation passed in seq_idx's place.
    """
    if isinstance(seq_idx, str):
        raise TypeError(
            "seq_idx must be a tensor, the fourth positional argument is not the activation: "
            f"pass activation={seq_idx!r} by keyword, got {seq_idx!r}"
        )
    contract.is_tensor("x", x)
    contract.is_tensor("weight", weight)
    if x.dim() != 3:
        raise ValueError(f"x must be [B, D, T], got {list(x.shape)}")
    if weight.dim() != 2:
        raise ValueError(f"weight must be [D, W], got {list(weight.shape)}")
    result = causal_conv1d(
        x.transpose(1, 2),
        weight,
        bias,
        activation=activation,
        initial_state=initial_states,
        cu_seqlens=cu_seqlens,
        seq_idx=seq_idx,
        return_final_state=return_final_states,
        state_len=weight.shape[-1] - 1,
        final_state_out=final_states_out,
    )
    if return_final_states:
        return result[0].transpose(1, 2), result[1]
    return result.transpose(1, 2)


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last state_len inputs of each packed sequence, zeros in front of shorter ones.

    Args:
        x: [T_total, D], any strides.
        cu_seqlens: [N + 1] int32 or int64.
        state_len: columns, >= 0.

    Returns:
        [N, D, state_len] in x's dtype, contiguous.

    Raises:
        TypeError, ValueError, NotImplementedError: as `causal_conv1d`.
    """
    contract.is_tensor("x", x)
    if contract.is_differentiated(x):
        contract.no_gradients(x=x)
    try:
        final_state = x.new_empty((cu_seqlens.shape[0] - 1, x.shape[-1], state_len))
    except calls.MALFORMED:
        contract.new_states(x, cu_seqlens, state_len)
        raise
    calls.call(calls.states, x, cu_seqlens, final_state)
    return final_state


def _flattened(name: str, x: Tensor) -> Tensor:
    try:
        return x.view(1, -1, x.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"{name} must be viewable as [1, B*T, D] when cu_seqlens is given, got shape "
            f"{list(x.shape)} with strides {x.stride()}"
        ) from None
