"""Hub layers: the two functions that transformers looks up, under its own signatures.

Inside a layer `self` is the model's function object, so nothing may be stored there. Models pass
all of their keywords on. The packing ones, silently ignored elsewhere, are honoured; a tensor under
an unknown name is refused, since it may be a boundary too; options such as use_cache do not concern
a convolution.
"""

from __future__ import annotations

from torch import Tensor, nn

from . import checking, ops

_OFFSETS = ("cu_seqlens", "cu_seq_lens_q")
# What attention or the loss needs of a model's keywords and a convolution does not.
_IGNORED = {
    "cache_position",
    "cu_seq_lens_k",
    "input_ids",
    "labels",
    "max_length_k",
    "max_length_q",
    "mm_token_type_ids",
    "num_items_in_batch",
    "position_ids",
    "shift_labels",
    "token_type_ids",
    "weight",  # of the classes, in the loss
}


def packing(kwargs: dict) -> tuple[Tensor | None, Tensor | None]:
    """(cu_seqlens, seq_idx) among a call's keywords.

    When both are given the offsets win, since collators derive the one from the other; checking
    mode compares them.

    Raises:
        TypeError: a packing keyword that is not a tensor, or a tensor under an unknown name.
        ValueError: two different tensors of offsets; in checking mode, offsets and ids that tell
            different sequences.
    """
    for name in (*_OFFSETS, "seq_idx"):
        if kwargs.get(name) is not None and not isinstance(kwargs[name], Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(kwargs[name]).__name__}")
    given = {k: v for k, v in kwargs.items() if isinstance(v, Tensor) and k not in _IGNORED}
    seq_idx = given.pop("seq_idx", None)
    names = [name for name in _OFFSETS if name in given]
    cu_seqlens = given.pop(names[0]) if names else None
    for name in names[1:]:
        other = given.pop(name)
        if other is not cu_seqlens:
            raise ValueError(f"{names[0]} and {name} must be the same tensor, got two")
    if given:
        name = next(iter(given))
        raise TypeError(f"{name} must be a known packing keyword, got a tensor under {name!r}")
    if cu_seqlens is None or seq_idx is None:
        return cu_seqlens, seq_idx
    if checking.enabled():
        checking.same_packing(cu_seqlens, seq_idx)
    return cu_seqlens, None


def taps(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """A weight or bias in a dtype that the kernels take beside x's: fp32 holds both halves."""
    if parameter is None or parameter.dtype == x.dtype or parameter.dtype.itemsize != 2:
        return parameter
    return parameter.float()


class causal_conv1d_fn(nn.Module):
    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs,
    ) -> Tensor:
        cu_seqlens, seq_idx = packing(kwargs)
        y = ops.causal_conv1d(
            hidden_states.transpose(1, 2),
            taps(weight, hidden_states),
            taps(bias, hidden_states),
            activation=activation,
            cu_seqlens=cu_seqlens,
            seq_idx=seq_idx,
        )
        return y.transpose(1, 2)


class causal_conv1d_update(nn.Module):
    can_torch_compile = True
    has_backward = False

    def forward(
        self,
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        return ops.causal_conv1d_update(
            hidden_states,
            conv_state,
            taps(weight, hidden_states),
            taps(bias, hidden_states),
            activation,
        )
