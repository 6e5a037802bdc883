"""Packed rows for the parts of a block that cannot take offsets: one sequence at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Segment = tuple[int, int, int]  # row, start, end


def bounds(cu_seqlens: Tensor | None, seq_idx: Tensor | None, T: int) -> list[Segment]:
    """Every sequence that has tokens. Reads values on the host: what runs one sequence at a time
    needs them there."""
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
        return [(0, a, b) for a, b in zip(offsets, offsets[1:], strict=False) if b > a]
    found = []
    for row, ids in enumerate(seq_idx.tolist()):
        start = 0
        for t in range(1, T + 1):
            if t == T or ids[t] != ids[start]:
                if ids[start] >= 0:
                    found.append((row, start, t))
                start = t
    return found


def run_rule(
    rule: Callable,
    tensors: tuple[Tensor, ...],
    gates: dict[str, Tensor],
    segments: list[Segment],
    initial_state: Tensor | None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """A delta rule over packed rows [B, T, ...]: each sequence from zeros, a row's first one from
    its initial state; the final state is that of each row's last sequence. Padding gives zeros."""
    value = tensors[-1]
    out, states = torch.zeros_like(value), {}
    for row, start, end in segments:
        first = initial_state is not None and row not in states
        part, states[row] = rule(
            *(t[row : row + 1, start:end] for t in tensors),
            **{name: g[row : row + 1, start:end] for name, g in gates.items()},
            initial_state=initial_state[row : row + 1] if first else None,
            **kwargs,
        )
        out[row : row + 1, start:end] = part
    some = next(iter(states.values()), None)
    if some is None:
        return out, initial_state
    for row in range(value.shape[0]):
        if row not in states:  # a row of padding only
            kept = initial_state is not None
            states[row] = initial_state[row : row + 1] if kept else torch.zeros_like(some)
    return out, torch.cat([states[row] for row in range(value.shape[0])])


def run_block(
    block: Callable, hidden_states: Tensor, mask: Tensor | None, segments: list[Segment], cache
) -> Tensor:
    """A whole block over packed rows; the cache keeps the last sequence. Padding gives zeros."""
    out = torch.zeros_like(hidden_states)
    for i, (row, start, end) in enumerate(segments):
        out[row : row + 1, start:end] = block(
            hidden_states[row : row + 1, start:end],
            cache if i == len(segments) - 1 else None,
            None if mask is None else mask[row : row + 1, start:end],
        )
    return out
