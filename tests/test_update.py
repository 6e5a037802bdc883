"""Decode update against the fp64 reference: layouts, slots, circular, several tokens, varlen,
accepted counts."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases import (
    FLOATS,
    LAYOUTS,
    assert_rounded,
    at_offset,
    every_other,
    offsets,
    randn,
    scale_of,
)


def check(kernel, reference, x, state, weight, bias=None, silu=True, **kw):
    exact, expected = reference.update(x, state, weight, bias, silu=silu, **kw)
    scale = scale_of(x, weight, bias, state)
    out = torch.full_like(x, float("nan"))
    y = kernel.causal_conv1d_update(x, state, weight, bias, "silu" if silu else None, out=out, **kw)
    assert y is out
    assert_rounded(y, exact, scale)
    assert torch.equal(state.nan_to_num(9.0), expected.to(state.dtype).nan_to_num(9.0))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("state_dtype", FLOATS)
@pytest.mark.parametrize("W", range(1, 9))
@pytest.mark.parametrize("spare", [0, 1, 3])
def test_one_token(kernel, reference, device, dtype, state_dtype, W, spare):
    D = 1030
    x = randn(3, D, dtype=dtype, device=device)
    state = randn(3, D, W - 1 + spare, dtype=state_dtype, device=device)
    weight, bias = randn(D, W, dtype=dtype, device=device), randn(D, device=device)
    check(kernel, reference, x, state, weight, bias)


@pytest.mark.parametrize("D", [1, 2, 3, 4, 7, 8, 20, 257, 4128])
@pytest.mark.parametrize("T", [None, 1, 2, 4, 5, 9])
@pytest.mark.parametrize("L", [3, 4, 8, 12])
def test_tokens_and_channels(kernel, reference, device, D, T, L):
    shape = (2, D) if T is None else (2, D, T)
    x = randn(*shape, dtype=torch.bfloat16, device=device)
    state = randn(2, D, L, dtype=torch.bfloat16, device=device)
    check(kernel, reference, x, state, randn(D, 4, device=device))


@pytest.mark.parametrize("L", [3, 4, 5, 11])
@pytest.mark.parametrize("T", [1, 2, 3, 7])
def test_circular(kernel, reference, device, L, T):
    x = randn(4, 40, T, device=device)
    state = randn(4, 40, L, device=device)
    seqlens = torch.tensor([0, 1, L, 1000], dtype=torch.int32, device=device)
    check(kernel, reference, x, state, randn(40, 4, device=device), cache_seqlens=seqlens)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("W", [2, 4, 5])
def test_slots(kernel, reference, device, index, W):
    """Unsorted slots of a far larger pool; padding and out-of-range rows give 0, touch nothing."""
    D, S = 64, 50
    x = randn(7, D, dtype=torch.bfloat16, device=device)
    x[[1, 4, 6]] = float("nan")
    pool = randn(S, D, W, dtype=torch.bfloat16, device=device)
    slots = torch.tensor([49, -1, 0, 17, -5, 3, 50], dtype=index, device=device)
    unused = [s for s in range(S) if s not in (49, 0, 17, 3)]
    pool[unused] = float("nan")
    check(kernel, reference, x, pool, randn(D, W, device=device), conv_state_indices=slots)


def test_all_padding(kernel, device):
    x = torch.full((3, 16), float("nan"), device=device)
    pool = randn(2, 16, 4, device=device)
    before = pool.clone()
    slots = torch.full((3,), -1, dtype=torch.int32, device=device)
    y = kernel.causal_conv1d_update(x, pool, randn(16, 4, device=device), conv_state_indices=slots)
    assert (y == 0).all() and torch.equal(pool, before)


def test_varlen_mixes_prefill_chunks_and_decode_rows(kernel, reference, device):
    lengths = [1, 1, 7, 1, 0, 3]
    x = randn(sum(lengths), 48, dtype=torch.bfloat16, device=device)
    pool = randn(9, 48, 4, dtype=torch.bfloat16, device=device)
    slots = torch.tensor([8, -1, 2, 3, 4, 0], dtype=torch.int32, device=device)
    check(
        kernel, reference, x, pool, randn(48, 4, device=device),
        cu_seqlens=offsets(lengths, device), conv_state_indices=slots,
    )  # fmt: skip


@pytest.mark.parametrize("drafted", [1, 3, 5])
@pytest.mark.parametrize("T", [1, 2, 5])
def test_every_accepted_count(kernel, reference, device, drafted, T):
    D, N = 24, drafted + 1
    x = randn(N, D, T, device=device)
    state = randn(N, D, 3 + drafted, device=device)
    accepted = torch.arange(N, dtype=torch.int32, device=device)
    check(kernel, reference, x, state, randn(D, 4, device=device), num_accepted_tokens=accepted)


@pytest.mark.parametrize("mode", ["num_accepted_tokens", "cache_seqlens"])
def test_a_sequence_of_no_tokens_keeps_its_state(kernel, device, mode):
    """Zero-length rows pad a batch; their counts may be anything."""
    x, pool = randn(2, 16, device=device), randn(3, 16, 6, device=device)
    before = pool.clone()
    counts = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)
    cu = offsets([0, 2, 0], device)
    kernel.causal_conv1d_update(
        x, pool, randn(16, 4, device=device), cu_seqlens=cu, **{mode: counts}
    )
    assert torch.equal(pool[[0, 2]], before[[0, 2]]) and not torch.equal(pool[1], before[1])


def test_rollback_equals_never_having_drafted(kernel, device):
    """Draft 4, accept any number, go on: the bits of a run that only saw accepted tokens."""
    D, K = 16, 4
    weight = randn(D, 4, device=device)
    prompt, draft, more = (randn(1, n, D, device=device) for n in (6, K, 3))
    for accepted in range(K + 1):
        _, state = kernel.causal_conv1d(prompt, weight, return_final_state=True, state_len=3 + K)
        full = torch.tensor([K], dtype=torch.int32, device=device)
        kernel.causal_conv1d_update(draft.transpose(1, 2), state, weight, num_accepted_tokens=full)
        y = kernel.causal_conv1d_update(
            more.transpose(1, 2), state, weight,
            num_accepted_tokens=torch.tensor([accepted], dtype=torch.int32, device=device),
        )  # fmt: skip
        plain = kernel.causal_conv1d(torch.cat([prompt, draft[:, :accepted], more], 1), weight)
        assert torch.equal(y.transpose(1, 2), plain[:, -3:])


def test_strided_pool_view_and_projection_slice(kernel, reference, device):
    """State inside a bigger buffer, x a slice of a fused projection: nothing around is touched."""
    D = 32
    fused = torch.full((5, D + 40), float("nan"), dtype=torch.bfloat16, device=device)
    x = fused[:, 8 : 8 + D]
    x.copy_(torch.randn(5, D, device=device))
    pool = torch.full((5, D + 3, 7), float("nan"), dtype=torch.bfloat16, device=device)
    state = pool[:, 1 : 1 + D, 2:6]
    state.copy_(torch.randn(5, D, 4, device=device))
    check(kernel, reference, x, state, randn(D, 4, device=device))
    assert torch.isnan(pool).sum() == pool.numel() - state.numel()


def test_channel_last_state(kernel, reference, device):
    x, state = randn(3, 64, device=device), randn(3, 3, 64, device=device).transpose(1, 2)
    check(kernel, reference, x, state, randn(64, 4, device=device))


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("L", [3, 5])
def test_float64_on_cpu(kernel, reference, device, emulated, T, L):
    if device.type != "cpu" or emulated:
        pytest.skip("float64 is a CPU dtype")
    x, state = (torch.randn(2, 20, n, dtype=torch.float64) for n in (T, L))
    check(kernel, reference, x, state, torch.randn(20, 4, dtype=torch.float64))


@pytest.mark.parametrize("elements", range(1, 8))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("L", [3, 4])
def test_misaligned_buffers(kernel, device, dtype, elements, L):
    x, weight = randn(3, 64, dtype=dtype, device=device), randn(64, 4, dtype=dtype, device=device)
    state = randn(3, 64, L, dtype=dtype, device=device)
    a, w, s = (at_offset(t, elements) for t in (x, weight, state))
    out = at_offset(torch.zeros_like(x), elements)
    y = kernel.causal_conv1d_update(x, state, weight, activation="silu")
    kernel.causal_conv1d_update(a, s, w, activation="silu", out=out)
    assert torch.equal(out, y) and torch.equal(s, state)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("mode", ["cache_seqlens", "num_accepted_tokens"])
def test_every_input_may_be_strided(kernel, device, index, mode):
    def vector(*values):
        return torch.tensor(values, dtype=index, device=device)

    x, weight = randn(6, 24, device=device), randn(24, 4, device=device)
    bias, pool = randn(24, device=device), randn(5, 24, 6, device=device)
    tensors = (x, pool, weight, bias, vector(4, 0, -1), vector(0, 2, 5, 6), vector(1, 3, 2))
    spread = [every_other(t) for t in tensors]
    results = []
    for x, pool, weight, bias, slots, cu, values in (tensors, spread):
        y = kernel.causal_conv1d_update(
            x, pool, weight, bias, "silu", conv_state_indices=slots, cu_seqlens=cu,
            **{mode: values},
        )  # fmt: skip
        results.append((y, pool))
    for plain, strided in zip(*results, strict=True):
        assert torch.equal(plain, strided)


def test_buffers_allocated_inside_are_all_written(kernel, device, nan_empty):
    weight, pool = randn(24, 4, device=device), randn(4, 24, 4, device=device)
    slots = torch.tensor([3, -1, 9], device=device)
    for x, kw in (
        (randn(3, 24, device=device), {}),
        (randn(3, 24, 5, device=device), {}),
        # rows before, between and after the sequences belong to none
        (randn(12, 24, device=device), {"cu_seqlens": torch.tensor([1, 3, 5, 8], device=device)}),
    ):
        y = kernel.causal_conv1d_update(x, pool, weight, conv_state_indices=slots, **kw)
        assert not torch.isnan(y).any() and not torch.isnan(pool).any()


@pytest.mark.parametrize("shape", [(0, 8), (2, 0), (2, 8, 0)])
def test_empty(kernel, device, shape):
    x = torch.empty(shape, device=device)
    state = randn(shape[0], shape[1], 4, device=device)
    before = state.clone()
    y = kernel.causal_conv1d_update(x, state, torch.empty(shape[1], 4, device=device))
    assert y.shape == x.shape and torch.equal(state, before)


@pytest.mark.parametrize(
    "dtypes", list(itertools.product(FLOATS, (False, True), FLOATS, (None, False, True)))
)
def test_dtype_cube(kernel, reference, device, dtypes):
    x_dtype, wide_weight, state_dtype, bias_kind = dtypes
    x = randn(2, 24, dtype=x_dtype, device=device)
    weight = randn(24, 4, dtype=torch.float32 if wide_weight else x_dtype, device=device)
    bias = None
    if bias_kind is not None:
        bias = randn(24, dtype=torch.float32 if bias_kind else x_dtype, device=device)
    check(kernel, reference, x, randn(2, 24, 4, dtype=state_dtype, device=device), weight, bias)


@settings(
    max_examples=120, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(data=st.data())
def test_any_contract(kernel, reference, device, data):
    draw = data.draw
    dtype, state_dtype = draw(st.sampled_from(FLOATS)), draw(st.sampled_from(FLOATS))
    W, D = draw(st.integers(1, 8)), draw(st.sampled_from([1, 3, 4, 8, 30, 64]))
    L = W - 1 + draw(st.integers(0, 4))
    kind = draw(st.sampled_from(["one", "many", "varlen"]))
    kw = {}
    layout = draw(st.sampled_from(LAYOUTS))
    if kind == "varlen":
        lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
        x, N = randn(sum(lengths), D, dtype=dtype, device=device, layout=layout), len(lengths)
        kw["cu_seqlens"] = offsets(lengths, device)
    else:
        N = draw(st.integers(1, 4))
        shape = (N, D) if kind == "one" else (N, draw(st.integers(1, 6)), D)
        x = randn(*shape, dtype=dtype, device=device, layout=layout)
        x = x if kind == "one" else x.transpose(1, 2)
    S = N
    if draw(st.booleans()):
        S = N + draw(st.integers(0, 5))
        order = draw(st.permutations(range(S)))[:N]
        order = [-1 if draw(st.integers(0, 4)) == 0 else s for s in order]
        kw["conv_state_indices"] = torch.tensor(order, dtype=torch.int32, device=device)
    mode = draw(st.sampled_from(["shift", "circular", "accepted"]))
    if mode == "circular" and L > 0:
        seqlens = [draw(st.integers(0, 30)) for _ in range(N)]
        kw["cache_seqlens"] = torch.tensor(seqlens, dtype=torch.int32, device=device)
    elif mode == "accepted":
        counts = [draw(st.integers(0, L - (W - 1))) for _ in range(N)]
        kw["num_accepted_tokens"] = torch.tensor(counts, dtype=torch.int32, device=device)
    layout = draw(st.sampled_from(LAYOUTS))
    state = randn(S, D, L, dtype=state_dtype, device=device, layout=layout)
    weight = randn(D, W, dtype=draw(st.sampled_from([dtype, torch.float32])), device=device)
    bias = randn(D, device=device) if draw(st.booleans()) else None
    check(kernel, reference, x, state, weight, bias, silu=draw(st.booleans()), **kw)
