"""A call of a compiled op: how its final state is allocated, and why it was refused. The host code
checks by itself; the contract is asked only when it has refused, and in checking mode."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checking, contract
from ._ops import ops

fwd = ops.fwd.default
bwd = ops.bwd.default
update = ops.update.default
states = ops.states.default

# What each op accepts, and in checking mode the values too, in the op's own argument order.
RULES = {
    fwd: contract.fwd,
    bwd: contract.bwd,
    update: contract.update,
    states: contract.states,
}
VALUES = {fwd: checking.fwd, update: checking.update, states: checking.states}

# What Python and torch raise where an argument is too wrong to size a buffer by.
MALFORMED = (AttributeError, IndexError, RuntimeError, TypeError)


def call(op: torch._ops.OpOverload, *args) -> None:
    if checking.enabled():
        RULES[op](*args)
        if op in VALUES:
            VALUES[op](*args)
    try:
        op(*args)
    except (RuntimeError, TypeError):
        RULES[op](*args)  # names what is wrong, if an argument is
        raise


def new_state(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    state_len: int | None,
    initial_state: Tensor | None,
) -> Tensor:
    try:
        N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        W = weight.shape[-1]
        L = W if state_len is None else state_len
        if L < W - 1:
            contract.state_len(L, W - 1)
        return (x if initial_state is None else initial_state).new_empty((N, x.shape[-1], L))
    except MALFORMED:
        contract.new_state(x, weight, cu_seqlens, state_len, initial_state)
        raise
