"""Checking mode: reads index values on the host, which costs a sync, and names the first bad one.

Off, bad values cannot read or write out of bounds: they are clamped, or their rows skipped.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor

_enabled = os.environ.get("SHORT_CONV_CHECK", "0") not in ("", "0")


def enabled() -> bool:
    return _enabled


@contextlib.contextmanager
def checking(on: bool = True) -> Iterator[None]:
    """Validates cu_seqlens, seq_idx, slots and counts of every call inside the block.

    Raises ValueError naming the first bad entry. SHORT_CONV_CHECK=1 switches it on for a process.
    """
    global _enabled
    before, _enabled = _enabled, on
    try:
        yield
    finally:
        _enabled = before


def offsets(name: str, cu: Tensor, T: int) -> None:
    values = cu.tolist()
    for i, value in enumerate(values):
        low = values[i - 1] if i else 0
        if not low <= value <= T:
            raise ValueError(
                f"{name} must not decrease and must stay within [0, T={T}], "
                f"got {name}[{i}] = {value} after {low}"
            )


def sequence_ids(name: str, seq_idx: Tensor) -> None:
    for b, row in enumerate(seq_idx.tolist()):
        real = [(t, value) for t, value in enumerate(row) if value >= 0]
        for (t0, before), (t1, value) in zip(real, real[1:], strict=False):
            if value < before or t1 != t0 + 1:
                raise ValueError(
                    f"{name} must not decrease along a row, with padding (< 0) only in front and "
                    f"at the end, got {name}[{b}, {t1}] = {value} after {before} at {t0}"
                )


def slots(name: str, indices: Tensor, count: int) -> None:
    seen: dict[int, int] = {}
    for i, slot in enumerate(indices.tolist()):
        if slot >= count:
            raise ValueError(f"{name} must stay below S={count}, got {name}[{i}] = {slot}")
        if slot >= 0 and slot in seen:
            raise ValueError(
                f"{name} must not name a slot twice, got "
                f"{name}[{i}] = {name}[{seen[slot]}] = {slot}"
            )
        seen[slot] = i


def counts(name: str, values: Tensor, most: int) -> None:
    for i, value in enumerate(values.tolist()):
        if not 0 <= value <= most:
            raise ValueError(f"{name} must stay within [0, {most}], got {name}[{i}] = {value}")


def same_packing(cu_seqlens: Tensor, seq_idx: Tensor) -> None:
    """Whether rows change id exactly where a sequence starts."""
    ids = seq_idx.flatten()
    changes = (torch.nonzero(ids[1:] != ids[:-1]).flatten() + 1).tolist()
    starts = sorted({s for s in cu_seqlens.tolist() if 0 < s < ids.numel()})
    if changes != starts:
        raise ValueError(
            f"seq_idx and cu_seqlens disagree: seq_idx changes at rows {changes}, cu_seqlens has "
            f"starts at {starts}"
        )


# One function per op, in the op's own argument order: the values of what the contract has allowed.


def fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
    state_indices: Tensor | None,
    has_initial_state: Tensor | None,
    out: Tensor,
    final_state: Tensor | None,
    silu: bool,
) -> None:
    if cu_seqlens is not None:
        offsets("cu_seqlens", cu_seqlens, x.shape[1])
    if seq_idx is not None:
        sequence_ids("seq_idx", seq_idx)
    pool = initial_state if initial_state is not None else final_state
    if state_indices is not None and pool is not None:
        slots("state_indices", state_indices, pool.shape[0])


def update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    num_accepted_tokens: Tensor | None,
    out: Tensor,
    silu: bool,
) -> None:
    if cu_seqlens is not None:
        offsets("cu_seqlens", cu_seqlens, x.shape[0])
    if conv_state_indices is not None:
        slots("conv_state_indices", conv_state_indices, conv_state.shape[0])
    if cache_seqlens is not None:
        counts("cache_seqlens", cache_seqlens, torch.iinfo(torch.int64).max)
    if num_accepted_tokens is not None:
        kept = weight.shape[1] - 1
        counts("num_accepted_tokens", num_accepted_tokens, conv_state.shape[2] - kept)


def states(x: Tensor, cu_seqlens: Tensor, final_state: Tensor) -> None:
    offsets("cu_seqlens", cu_seqlens, x.shape[0])
