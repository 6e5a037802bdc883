"""The operation by its definition, in fp64, one sequence after another. An oracle for tests and
benchmarks; no call ever falls back to it."""

from __future__ import annotations

import torch
from torch import Tensor


def convolve(stream: Tensor, taps: Tensor, bias: Tensor | None, silu: bool, count: int) -> Tensor:
    """The last `count` outputs of a stream [time, D] that holds W-1 rows of history at least."""
    W, total = taps.shape[1], stream.shape[0]
    y = stream.new_zeros(count, stream.shape[1])
    for i in range(count):
        t = total - count + i
        window = stream[t - (W - 1) : t + 1]
        y[i] = (window * taps.t()).sum(0)
    if bias is not None:
        y = y + bias
    return y * torch.sigmoid(y) if silu else y


def last_columns(stream: Tensor, count: int) -> Tensor:
    """[D, count]: the newest rows of a stream, zeros in front of a shorter one."""
    padded = torch.cat([stream.new_zeros(count, stream.shape[1]), stream])
    return padded[padded.shape[0] - count :].t()


def runs(ids: list[int]) -> list[tuple[int, int]]:
    """[start, end) of each run of equal ids that is not padding."""
    found, t = [], 0
    while t < len(ids):
        end = t
        while end < len(ids) and ids[end] == ids[t]:
            end += 1
        if ids[t] >= 0:
            found.append((t, end))
        t = end
    return found


def fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = False,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    state_len: int | None = None,
    state_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """(y [B, T, D], {state row: final state [D, state_len]}) in fp64."""
    B, T, D = x.shape
    W = weight.shape[1]
    L = W if state_len is None else state_len
    taps, offset = weight.double(), None if bias is None else bias.double()
    y, final = x.new_zeros(B, T, D, dtype=torch.float64), {}
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    for n in range(N):
        slot = n if state_indices is None else int(state_indices[n])
        if state_indices is not None and not 0 <= slot < initial_state.shape[0]:
            continue
        b = n if cu_seqlens is None else 0
        if cu_seqlens is not None:
            spans = [(int(cu_seqlens[n]), int(cu_seqlens[n + 1]))]
        elif seq_idx is not None:
            spans = runs(seq_idx[b].tolist()) or [(0, 0)]
        else:
            spans = [(0, T)]
        kept = initial_state is not None and (has_initial_state is None or has_initial_state[n])
        before = initial_state[slot].double().t() if kept else x.new_zeros(0, D).double()
        for start, end in spans:
            rows = x[b, start:end].double()
            stream = torch.cat([before, rows])
            padded = torch.cat([stream.new_zeros(W, D), stream])
            y[b, start:end] = convolve(padded, taps, offset, silu, end - start)
            final[slot] = last_columns(stream, L)
            before = before[:0]  # only the first sequence of a row continues its state
    return y, final


def update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = False,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y shaped like x, the whole state [S, D, L] afterwards) in fp64."""
    W, L = weight.shape[1], conv_state.shape[2]
    taps, offset = weight.double(), None if bias is None else bias.double()
    state = conv_state.double().clone()
    y = torch.zeros_like(x, dtype=torch.float64)
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    for n in range(N):
        slot = n if conv_state_indices is None else int(conv_state_indices[n])
        if not 0 <= slot < state.shape[0]:
            continue
        if cu_seqlens is not None:
            span = slice(int(cu_seqlens[n]), int(cu_seqlens[n + 1]))
            rows, result = x[span].double(), y[span]
        elif x.dim() == 3:
            rows, result = x[n].double().t(), y[n].t()
        else:
            rows, result = x[n : n + 1].double(), y[n : n + 1]
        if rows.shape[0] == 0:
            continue
        old = state[slot].t().clone()
        if cache_seqlens is not None:
            position = int(cache_seqlens[n])
            columns = [(position - k) % L for k in range(W - 1, 0, -1)]
            stream = torch.cat([old[columns], rows])
            for t, row in enumerate(rows):
                state[slot][:, (position + t) % L] = row
        else:
            if num_accepted_tokens is not None:
                accepted = min(max(int(num_accepted_tokens[n]), 0), L - (W - 1))
                old = old[: accepted + W - 1]
            stream = torch.cat([old, rows])
            state[slot] = last_columns(stream, L)
        result.copy_(convolve(stream, taps, offset, silu, rows.shape[0]))
    return y, state
