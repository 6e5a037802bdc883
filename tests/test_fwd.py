"""Bulk forward against the fp64 reference: layouts, dtypes, widths, packings, states, empties."""

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


def check(kernel, reference, x, weight, bias=None, **kw):
    """Runs once with NaN-filled outputs and compares y and the final state."""
    silu = kw.pop("silu", True)
    initial = kw.get("initial_state")
    kept = None if initial is None else initial.clone()
    out = kw.pop("out", torch.empty_like(x)).fill_(float("nan"))
    result = kernel.causal_conv1d(
        x, weight, bias, activation="silu" if silu else None, out=out, **kw
    )
    y, final = result if kw.get("return_final_state") else (result, None)
    assert y is out
    options = {k: v for k, v in kw.items() if k not in ("return_final_state", "final_state_out")}
    if final is not None:
        options["state_len"] = final.shape[-1]
    exact, states = reference.fwd(x, weight, bias, silu=silu, **(options | {"initial_state": kept}))
    assert_rounded(y, exact, scale_of(x, weight, bias, kept))
    for slot, state in states.items() if final is not None else ():
        rounded = state.to(x.dtype) if x.dtype != torch.float64 else state
        rounded = rounded.to(final.dtype) if kept is None else state.to(final.dtype)
        assert torch.equal(final[slot], rounded), f"state row {slot}"
    if kept is not None:
        written = list(states) if final is initial else []
        unwritten = [row for row in range(kept.shape[0]) if row not in written]
        assert torch.equal(initial[unwritten], kept[unwritten])
    return y, final


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
# 1..5 around the width; 7, 9, 17 around a tile of 4, 8 or 16 rows; 40 several tiles; 130 past a
# CPU tile of 64.
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 7, 9, 16, 17, 40, 130])
def test_dense(kernel, reference, device, layout, dtype, T):
    D = 40
    x = randn(2, T, D, dtype=dtype, device=device, layout=layout)
    weight = randn(D, 4, dtype=dtype, device=device)
    check(kernel, reference, x, weight, return_final_state=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("W", [1, 2, 3, 4, 5, 8])
# One access a channel, one step of a block, parts of several blocks.
@pytest.mark.parametrize("shape", [(2, 8, 5), (1, 1048, 3), (2, 8208, 2), (1, 16392, 1)])
def test_channel_first_without_states(kernel, reference, device, dtype, W, shape):
    x = randn(*shape, dtype=dtype, device=device, layout="channel_first")
    check(kernel, reference, x, randn(shape[-1], W, device=device))


@pytest.mark.parametrize("packing", ["dense", "cu_seqlens", "seq_idx"])
@pytest.mark.parametrize("T", [31, 32, 33, 64, 255, 257, 700])
@pytest.mark.parametrize("D", [5, 64, 130])
def test_layouts_agree_bitwise(kernel, device, packing, T, D):
    """Several tiles along time and channels, in x and in y, with states."""
    values, weight = randn(1, T, D, dtype=torch.bfloat16, device=device), randn(D, 4, device=device)
    cu = torch.tensor([0, 2, 2, T // 2, T - 3], dtype=torch.int32, device=device)
    ids = (torch.arange(T, device=device) // 19)[None].int()
    kw = {"dense": {}, "cu_seqlens": {"cu_seqlens": cu}, "seq_idx": {"seq_idx": ids}}[packing]
    initial = randn(4 if packing == "cu_seqlens" else 1, D, 4, device=device)
    expected, state = kernel.causal_conv1d(
        values, weight, activation="silu", initial_state=initial, return_final_state=True, **kw
    )
    for layout, out_layout in itertools.product(LAYOUTS, LAYOUTS):
        x = randn(1, T, D, dtype=torch.bfloat16, device=device, layout=layout).copy_(values)
        out = randn(1, T, D, dtype=torch.bfloat16, device=device, layout=out_layout)
        y, final = kernel.causal_conv1d(
            x, weight, activation="silu", initial_state=initial, return_final_state=True, out=out,
            **kw,
        )  # fmt: skip
        assert torch.equal(y, expected), (layout, out_layout)
        assert torch.equal(final, state), (layout, out_layout)


@pytest.mark.parametrize("W", range(1, 9))
@pytest.mark.parametrize("D", [1, 2, 3, 7, 8, 20, 100, 257, 1030])
def test_width_and_channels(kernel, reference, device, W, D):
    x = randn(1, 19, D, dtype=torch.bfloat16, device=device)
    weight, bias = randn(D, W, device=device), randn(D, device=device)
    initial = randn(1, D, W + 1, device=device)
    check(kernel, reference, x, weight, bias, initial_state=initial, return_final_state=True)


@pytest.mark.parametrize(
    "dtypes", list(itertools.product(FLOATS, (False, True), FLOATS, (None, False, True)))
)
def test_dtype_cube(kernel, reference, device, dtypes):
    x_dtype, wide_weight, state_dtype, bias_kind = dtypes
    x = randn(2, 11, 24, dtype=x_dtype, device=device)
    weight = randn(24, 4, dtype=torch.float32 if wide_weight else x_dtype, device=device)
    bias = None
    if bias_kind is not None:
        bias = randn(24, dtype=torch.float32 if bias_kind else x_dtype, device=device)
    initial = randn(2, 24, 4, dtype=state_dtype, device=device)
    check(kernel, reference, x, weight, bias, initial_state=initial, return_final_state=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("W", [1, 4, 8])
def test_float64_on_cpu(kernel, reference, device, emulated, W, layout):
    if device.type != "cpu" or emulated:
        pytest.skip("float64 is a CPU dtype")
    x = randn(2, 70, 24, dtype=torch.float64, layout=layout)
    weight, bias = torch.randn(24, W, dtype=torch.float64), torch.randn(24)
    initial = torch.randn(2, 24, 8, dtype=torch.float64)
    check(kernel, reference, x, weight, bias, initial_state=initial, return_final_state=True)


@pytest.mark.parametrize("D", [4128, 8192, 24576])
def test_model_widths(kernel, reference, device, D):
    """Channels of real models, bf16 with fp32 weights; 4128 is no multiple of a vector tile."""
    x = randn(2, 9, D, dtype=torch.bfloat16, device=device)
    initial = randn(2, D, 4, dtype=torch.bfloat16, device=device)
    check(kernel, reference, x, randn(D, 4, device=device), initial_state=initial)


@pytest.mark.parametrize("elements", range(1, 8))
@pytest.mark.parametrize("dtype", FLOATS)
def test_misaligned_buffers(kernel, device, dtype, elements):
    """Every base pointer off by the same elements: the bits of the aligned run."""
    x, weight = randn(1, 21, 64, dtype=dtype, device=device), randn(64, 4, dtype=dtype)
    weight, bias = weight.to(device), randn(64, dtype=dtype, device=device)
    initial = randn(1, 64, 4, dtype=dtype, device=device)
    y, final = kernel.causal_conv1d(
        x, weight, bias, activation="silu", initial_state=initial, return_final_state=True
    )
    a, w, b, i, out, into = (
        at_offset(t, elements) for t in (x, weight, bias, initial, torch.zeros_like(y), final)
    )
    into.fill_(float("nan"))
    kernel.causal_conv1d(a, w, b, activation="silu", initial_state=i, final_state_out=into, out=out)
    assert torch.equal(out, y) and torch.equal(into, final)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_every_input_may_be_strided(kernel, device, index):
    lengths = [4, 0, 9, 2]
    x, weight, bias = randn(1, 15, 24), randn(24, 4), randn(24)
    cu, slots = offsets(lengths, "cpu", index), torch.tensor([5, 1, -1, 0], dtype=index)
    flags, ids = torch.tensor([True, False, True, True]), torch.tensor([[0] * 7 + [1] * 8])
    pool = randn(6, 24, 4)
    tensors = [t.to(device) for t in (x, weight, bias, pool, cu, slots, flags, ids.to(index))]
    spread = [every_other(t) for t in tensors]
    results = []
    for x, weight, bias, pool, cu, slots, flags, ids in (tensors, spread):
        y, final = kernel.causal_conv1d(
            x, weight, bias, cu_seqlens=cu, initial_state=pool, state_indices=slots,
            has_initial_state=flags, return_final_state=True,
        )  # fmt: skip
        results.append((y, final, kernel.causal_conv1d(x, weight, bias, seq_idx=ids)))
    for plain, strided in zip(*results, strict=True):
        assert torch.equal(plain, strided)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_expanded_inputs(kernel, reference, device, dim):
    shape = [3, 11, 40]
    shape[dim] = 1
    x, weight = randn(*shape, device=device).expand(3, 11, 40), randn(1, 4, device=device)
    bias, initial = randn(1, device=device), randn(1, 1, 4, device=device)
    y, final = kernel.causal_conv1d(
        x, weight.expand(40, 4), bias.expand(40), initial_state=initial.expand(3, 40, 4),
        return_final_state=True,
    )  # fmt: skip
    again, states = kernel.causal_conv1d(
        x.contiguous(), weight.repeat(40, 1), bias.repeat(40), return_final_state=True,
        initial_state=initial.repeat(3, 40, 1),
    )  # fmt: skip
    assert torch.equal(y, again) and torch.equal(final, states)
    ids = torch.tensor([[0] * 5 + [1] * 6], device=device)
    y = kernel.causal_conv1d(x, weight.expand(40, 4), seq_idx=ids.expand(3, 11))
    exact, _ = reference.fwd(x, weight.expand(40, 4), seq_idx=ids.expand(3, 11))
    assert_rounded(y, exact, scale_of(x, weight, None))


def test_buffers_allocated_inside_are_all_written(kernel, device, nan_empty):
    """No element of y or of a final state keeps what the allocator held."""
    x, weight = randn(2, 30, 40, device=device), randn(40, 4, device=device)
    cu = offsets([3, 0, 17], device)
    ids = torch.tensor([[-1] * 4 + [0] * 26, [0] * 9 + [1] * 9 + [-1] * 12], device=device)
    state = randn(2, 40, 4, device=device)
    assert torch.isnan(torch.empty(1)).all()  # the fixture works
    for kw in (
        {}, {"cu_seqlens": cu}, {"seq_idx": ids}, {"state_len": 50},
        {"initial_state": state, "state_len": 50},
        {"initial_state": state, "state_indices": torch.tensor([-1, 0], device=device)},
    ):  # fmt: skip
        for result in kernel.causal_conv1d(x, weight, return_final_state=True, **kw):
            assert not torch.isnan(result).any(), kw
    assert not torch.isnan(kernel.causal_conv1d_varlen_states(x[0], cu, 8)).any()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("inplace", [False, True])
def test_threads_agree_bitwise(kernel, device, threads, inplace):
    """However the work is cut, in-place states included: they are read before they are written."""
    if device.type != "cpu":
        pytest.skip("threads are the CPU backend's")
    lengths = [1, 300, 0, 2, 97]
    x, weight = randn(1, 400, 700, dtype=torch.bfloat16), randn(700, 4)
    results = []
    for count in (1, 2, 5):
        threads(count)
        torch.manual_seed(3)
        state = randn(5, 700, 4)
        y, final = kernel.causal_conv1d(
            x, weight, activation="silu", cu_seqlens=offsets(lengths, "cpu"), initial_state=state,
            final_state_out=state if inplace else None, return_final_state=True,
        )  # fmt: skip
        z = kernel.causal_conv1d_update(x[0, :5], final, weight)
        results.append((y, final, z))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


PACKS = {
    "mixed": [3, 1, 2, 17, 5],
    "empty in front": [0, 0, 6],
    "empty at the end": [6, 0, 0],
    "empty between": [2, 0, 0, 5],
    "all empty": [0, 0, 0],
    "ones": [1] * 37,
    "eights": [8] * 6,
    "one": [41],
    "none": [],
}


@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS.keys())
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", ["contiguous", "odd", "channel_first"])
def test_packed(kernel, reference, device, lengths, states, index, layout):
    """With a padded tail of NaN rows, which must give zeros and touch nothing."""
    D, T, N = 24, sum(lengths) + 3, len(lengths)
    x = randn(1, T, D, dtype=torch.bfloat16, device=device, layout=layout)
    x[:, sum(lengths) :] = float("nan")
    weight = randn(D, 4, device=device)
    initial = randn(N, D, 4, device=device) if states else None
    out = torch.full_like(x, float("nan"))
    y, final = kernel.causal_conv1d(
        x, weight, activation="silu", cu_seqlens=offsets(lengths, device, index),
        initial_state=initial, return_final_state=True, out=out,
    )  # fmt: skip
    real = x[:, : sum(lengths)]
    exact, expected = reference.fwd(
        real, weight, silu=True, cu_seqlens=offsets(lengths, device), initial_state=initial
    )
    assert_rounded(y[:, : sum(lengths)], exact, scale_of(real, weight, None, initial))
    assert (y[:, sum(lengths) :] == 0).all()
    for n in range(N):
        assert torch.equal(final[n].double(), expected[n])


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize(
    "ids",
    [
        [0] * 9,
        [0, 0, 1, 1, 1, 2, 3, 3, 3],
        [-1, -1, 0, 0, 0, 1, 1, 2, 2],
        [0, 0, 0, 0, 4, 4, 4, -1, -1],
        [-1, 0, 1, 1, 1, 1, 1, -1, -1],
        [-1] * 9,
        [-1] * 8 + [5],
        [3] + [-1] * 8,
    ],
)
def test_seq_idx(kernel, reference, device, ids, states):
    """Rows of padding hold NaN; two rows with the packing mirrored by different data."""
    seq_idx = torch.tensor([ids, [0] * 4 + [1] * 5], dtype=torch.int32, device=device)
    x = randn(2, 9, 24, dtype=torch.bfloat16, device=device)
    x[seq_idx < 0] = float("nan")
    weight = randn(24, 4, device=device)
    initial = randn(2, 24, 4, device=device) if states else None
    y, final = kernel.causal_conv1d(
        x, weight, activation="silu", seq_idx=seq_idx, initial_state=initial,
        return_final_state=True, out=torch.full_like(x, float("nan")),
    )  # fmt: skip
    exact, expected = reference.fwd(x, weight, silu=True, seq_idx=seq_idx, initial_state=initial)
    assert_rounded(y, exact, scale_of(x, weight, None, initial))
    for b in range(2):
        assert torch.equal(final[b].double(), expected[b])


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1.0])
def test_packed_rows_do_not_leak(kernel, device, poison):
    """Changing one sequence, to NaN even, changes no bit of another."""
    lengths = [5, 1, 9, 2, 30, 3]
    x = randn(1, 50, 64, dtype=torch.bfloat16, device=device)
    weight = randn(64, 4, device=device)
    cu = offsets(lengths, device)
    seq_idx = torch.repeat_interleave(
        torch.arange(6, device=device), torch.tensor(lengths, device=device)
    ).int()[None]
    for packing in ({"cu_seqlens": cu}, {"seq_idx": seq_idx}):
        before = kernel.causal_conv1d(x, weight, activation="silu", **packing)
        for n in range(6):
            changed = x.clone()
            changed[:, cu[n] : cu[n + 1]] = poison
            after = kernel.causal_conv1d(changed, weight, activation="silu", **packing)
            others = (seq_idx != n)[0]
            assert torch.equal(before[:, others], after[:, others])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("W", [2, 3, 4, 7, 8])
def test_any_split_is_bitwise_one_shot(kernel, device, dtype, W):
    """Prefill in pieces, then decode one by one, then several at once: the same bits throughout."""
    T, D = 45, 40
    x = randn(2, T, D, dtype=dtype, device=device)
    weight, bias = randn(D, W, dtype=dtype, device=device), randn(D, dtype=dtype, device=device)
    whole, final = kernel.causal_conv1d(x, weight, bias, activation="silu", return_final_state=True)
    for pieces in ([20, 1, 1, 2, 17, 4], [1] * 45, [2, 43], [44, 1], [16, 16, 13]):
        state = torch.zeros(2, D, W, dtype=dtype, device=device)
        outs, t = [], 0
        for i, length in enumerate(pieces):
            part = x[:, t : t + length]
            if i % 2 or length == 1:
                y = kernel.causal_conv1d_update(
                    part.transpose(1, 2), state, weight, bias, "silu"
                ).transpose(1, 2)
            else:
                y, _ = kernel.causal_conv1d(
                    part, weight, bias, activation="silu", initial_state=state,
                    final_state_out=state, return_final_state=True,
                )  # fmt: skip
            outs.append(y)
            t += length
        assert torch.equal(torch.cat(outs, 1), whole), pieces
        assert torch.equal(state, final), pieces


@pytest.mark.parametrize("T", [0, 1, 2, 3, 5, 40])
@pytest.mark.parametrize("L", [3, 4, 6])
def test_state_in_place(kernel, reference, device, T, L):
    """final_state_out is the initial state's own storage."""
    x = randn(3, T, 520, dtype=torch.bfloat16, device=device)
    weight = randn(520, 4, device=device)
    state = randn(3, 520, L, dtype=torch.bfloat16, device=device)
    exact, expected = reference.fwd(x, weight, initial_state=state.clone(), state_len=L)
    scale = scale_of(x, weight, None, state)
    y = kernel.causal_conv1d(x, weight, initial_state=state, final_state_out=state)
    assert_rounded(y, exact, scale)
    for b in range(3):
        assert torch.equal(state[b].double(), expected[b])


def test_strided_states_leave_neighbours_alone(kernel, reference, device):
    pool = torch.full((4, 40, 9), float("nan"), device=device)
    state = pool[1:3, 4:36, 2:6]
    state.copy_(torch.randn(2, 32, 4, device=device))
    x, weight = randn(2, 6, 32, device=device), randn(32, 4, device=device)
    _, expected = reference.fwd(x, weight, initial_state=state.clone())
    kernel.causal_conv1d(x, weight, initial_state=state, final_state_out=state)
    assert torch.equal(state.double(), torch.stack([expected[0], expected[1]]))
    assert torch.isnan(pool).sum() == pool.numel() - state.numel()


def test_oldest_column_of_a_wide_state_is_never_used(kernel, device):
    x, weight = randn(1, 5, 16, device=device), randn(16, 4, device=device)
    state = randn(1, 16, 4, device=device)
    clean = kernel.causal_conv1d(x, weight, initial_state=state)
    state[..., 0] = float("nan")
    assert torch.equal(kernel.causal_conv1d(x, weight, initial_state=state), clean)


def test_slots(kernel, reference, device):
    """A mixed batch of prefill chunks into a pool: own slots advance, padding and others do not."""
    lengths = [3, 1, 2, 4, 0]
    x = randn(1, 10, 24, dtype=torch.bfloat16, device=device)
    weight = randn(24, 4, device=device)
    slots = torch.tensor([5, 0, -1, 3, 6], dtype=torch.int32, device=device)
    flags = torch.tensor([False, True, True, True, True], device=device)
    pool = randn(8, 24, 4, device=device)
    pool[5] = float("nan")  # stale: its flag is False
    pool[1] = float("nan")  # nobody's
    before = pool.clone()
    cu = offsets(lengths, device)
    y, final = kernel.causal_conv1d(
        x, weight, cu_seqlens=cu, initial_state=pool, state_indices=slots,
        has_initial_state=flags, return_final_state=True, out=torch.full_like(x, float("nan")),
    )  # fmt: skip
    assert final is pool
    exact, expected = reference.fwd(
        x, weight, cu_seqlens=cu, initial_state=before, state_indices=slots,
        has_initial_state=flags,
    )  # fmt: skip
    assert_rounded(y, exact, scale_of(x, weight, None, before))
    for slot in range(8):
        want = expected[slot].float() if slot in expected else before[slot]
        assert torch.equal(pool[slot].nan_to_num(9.0), want.nan_to_num(9.0)), slot


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8), (2, 5, 0), (0, 0, 0)])
def test_empty(kernel, device, shape):
    B, T, D = shape
    x, weight = torch.empty(shape, device=device), torch.empty(D, 4, device=device)
    state = randn(B, D, 4, device=device)
    y, final = kernel.causal_conv1d(x, weight, initial_state=state, return_final_state=True)
    assert y.shape == x.shape and final.shape == state.shape
    if T == 0:
        assert torch.equal(final, state)


@pytest.mark.parametrize("state_len", [3, 4, 7, 30])
def test_state_len(kernel, reference, device, state_len):
    x, weight = randn(2, 9, 16, device=device), randn(16, 4, device=device)
    check(kernel, reference, x, weight, return_final_state=True, state_len=state_len)


def test_special_values(kernel, device):
    """SiLU at the ends of the range, as torch computes it."""
    values = torch.tensor([0.0, -0.0, 1e-30, 80.0, -80.0, 88.0, -88.0, 1e4, -1e4, 3e38, -3e38,
                           float("inf"), float("nan")], device=device)  # fmt: skip
    x = values.reshape(1, 1, -1).contiguous()
    weight = torch.ones(values.numel(), 1, device=device)
    y = kernel.causal_conv1d(x, weight, activation="silu")[0, 0]
    expected = torch.nn.functional.silu(values.double()).float()
    assert torch.allclose(y, expected, rtol=1e-6, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_silu_accuracy(kernel, device, dtype):
    """Every bf16 and fp16 result within one ulp of the exact one, fp32 within four."""
    x = torch.linspace(-30, 30, 100_000, device=device).to(dtype).reshape(1, -1, 1)
    y = kernel.causal_conv1d(x, torch.ones(1, 1, device=device), activation="silu").double()
    exact = torch.nn.functional.silu(x.double())
    ulps = {torch.float32: 4, torch.bfloat16: 1, torch.float16: 1}[dtype]
    unit = torch.finfo(dtype).eps * exact.abs() + (2.0**-24 if dtype == torch.float16 else 1e-37)
    assert ((y - exact).abs() <= ulps * unit).all()


@settings(
    max_examples=150, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(data=st.data())
def test_any_contract(kernel, reference, device, data):
    """Random combinations of everything that the contract allows."""
    draw = data.draw
    dtype = draw(st.sampled_from(FLOATS))
    W, D = draw(st.integers(1, 8)), draw(st.sampled_from([1, 2, 5, 8, 30, 64, 514]))
    packing = draw(st.sampled_from(["dense", "cu_seqlens", "seq_idx"]))
    B = 1 if packing == "cu_seqlens" else draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6))
    T = sum(lengths)
    x = randn(B, T, D, dtype=dtype, device=device, layout=draw(st.sampled_from(LAYOUTS)))
    weight = randn(D, W, dtype=draw(st.sampled_from([dtype, torch.float32])), device=device)
    bias = randn(D, device=device) if draw(st.booleans()) else None
    out = randn(B, T, D, dtype=dtype, device=device, layout=draw(st.sampled_from(LAYOUTS)))
    around = out.untyped_storage().nbytes() // out.element_size() - out.numel()
    kw = {"silu": draw(st.booleans()), "return_final_state": draw(st.booleans()), "out": out}
    N = B
    if packing == "cu_seqlens":
        kw["cu_seqlens"], N = offsets(lengths, device), len(lengths)
    elif packing == "seq_idx":
        ids = [i for i, n in enumerate(lengths) for _ in range(n)]
        pad = draw(st.integers(0, 2))
        ids = [-1] * min(pad, T) + ids[min(pad, T) :]
        kw["seq_idx"] = torch.tensor([ids] * B, dtype=torch.int32, device=device).reshape(B, T)
    if draw(st.booleans()):
        L = W - 1 + draw(st.integers(0, 2))
        kw["initial_state"] = randn(N, D, L, dtype=draw(st.sampled_from(FLOATS)), device=device)
        kw["state_len"] = L
        if draw(st.booleans()):
            kw["has_initial_state"] = torch.tensor(
                [draw(st.booleans()) for _ in range(N)], device=device
            )
        if draw(st.booleans()):
            S = N + draw(st.integers(0, 3))
            slots = [
                slot if draw(st.integers(0, 4)) else draw(st.sampled_from([-1, -7, S, S + 9]))
                for slot in draw(st.permutations(range(S)))[:N]
            ]
            kw["state_indices"] = torch.tensor(slots, dtype=torch.int32, device=device)
            kw["initial_state"] = randn(S, D, L, dtype=kw["initial_state"].dtype, device=device)
    check(kernel, reference, x, weight, bias, **kw)
    everything = torch.empty(0, dtype=dtype, device=device).set_(out.untyped_storage())
    assert torch.isnan(everything).sum() == around  # nothing but the view was written
