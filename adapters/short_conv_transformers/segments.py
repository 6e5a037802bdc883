"""Packed rows for the parts of a block that cannot take offsets: one segment at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def bounds(
    cu_seqlens: Tensor | None, seq_idx: Tensor | None, B: int, T: int
) -> list[tuple[int, int, int]]:
    """(row, start, end) of every segment. Reads values on the host: the torch delta rule loops
    there anyway."""
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
        if B != 1:
            raise ValueError(f"cu_seq_lens_q needs one packed row, got a batch of {B}")
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


def run_by_segment(
    rule: Callable,
    tensors: tuple[Tensor, ...],
    gates: dict[str, Tensor],
    segments: list[tuple[int, int, int]],
    initial_state: Tensor | None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """A delta rule over packed rows [B, T, ...]: each segment from zeros, a row's first one from
    its initial state; the final state is that of each row's last segment. Padding gives zeros."""
    value = tensors[-1]
    out, states = torch.zeros_like(value), {}
    for row, start, end in segments:
        first = row not in states
        part, state = rule(
            *(t[row : row + 1, start:end] for t in tensors),
            **{name: g[row : row + 1, start:end] for name, g in gates.items()},
            initial_state=initial_state[row : row + 1]
            if first and initial_state is not None
            else None,
            **kwargs,
        )
        out[row : row + 1, start:end] = part
        states[row] = state
    if any(state is None for state in states.values()) or not states:
        return out, initial_state
    return out, torch.cat([states[row] for row in range(value.shape[0])])
