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


def spans_of(
    n: int, T: int, cu_seqlens: Tensor | None, seq_idx: Tensor | None
) -> tuple[int, list[tuple[int, int]]]:
    """State row n's batch row and its sequences: the first continues the initial state, the last
    leaves the final one."""
    if cu_seqlens is not None:
        return 0, [(int(cu_seqlens[n]), int(cu_seqlens[n + 1]))]
    if seq_idx is not None:
        return n, runs(seq_idx[n].tolist()) or [(0, 0)]
    return n, [(0, T)]


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
        b, spans = spans_of(n, T, cu_seqlens, seq_idx)
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


def bwd(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = False,
    initial_state: Tensor | None = None,
    dfinal_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dx, dweight, dbias, dinitial_state) in fp64, each shaped like what it is the gradient of."""
    B, T, D = x.shape
    W = weight.shape[1]
    taps, offset = weight.double(), None if bias is None else bias.double()
    dx, dtaps, doffset = x.new_zeros(B, T, D).double(), torch.zeros_like(taps), taps.new_zeros(D)
    dinitial = None if initial_state is None else torch.zeros_like(initial_state).double()
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    for n in range(N):
        b, spans = spans_of(n, T, cu_seqlens, seq_idx)
        before = x.new_zeros(0, D).double()
        if initial_state is not None:
            before = initial_state[n].double().t()
        for start, end in spans:
            stream = torch.cat([taps.new_zeros(W, D), before, x[b, start:end].double()])
            count, dstream = end - start, torch.zeros_like(stream)
            g = dy[b, start:end].double()
            if silu:
                z = convolve(stream, taps, offset, False, count)
                s = torch.sigmoid(z)
                g = g * s * (1 + z * (1 - s))
            for i in range(count):
                t = stream.shape[0] - count + i
                window = slice(t - (W - 1), t + 1)
                dstream[window] += taps.t() * g[i]
                dtaps += (stream[window] * g[i]).t()
                doffset += g[i]
            if dfinal_state is not None and (start, end) == spans[-1]:
                incoming = dfinal_state[n].double().t()[-stream.shape[0] :]
                dstream[stream.shape[0] - incoming.shape[0] :] += incoming
            dx[b, start:end] = dstream[stream.shape[0] - count :]
            if initial_state is not None and (start, end) == spans[0]:
                dinitial[n] = dstream[W : W + before.shape[0]].t()
            before = before[:0]  # only the first sequence of a row continues its state
    return dx, dtaps, doffset, dinitial


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
