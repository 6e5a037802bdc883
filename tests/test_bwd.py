"""Gradients against the fp64 reference: layouts, dtypes, widths, packings, states, empties; and
how the backward behaves inside torch's autograd."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad, gradcheck
from torch.utils.checkpoint import checkpoint

from cases import (
    FLOATS,
    LAYOUTS,
    assert_rounded,
    at_offset,
    every_other,
    largest,
    offsets,
    randn,
    scale_of,
)

NAN = float("nan")
NAMES = ("x", "weight", "bias", "initial_state")


@pytest.fixture(autouse=True)
def uninitialised_is_nan():
    """Every buffer that torch allocates, the workspace too, starts as NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def leaf(tensor):
    """The same memory as a leaf that wants a gradient."""
    return None if tensor is None else tensor.detach().requires_grad_()


def gradients(kernel, x, dy, weight, bias=None, *, dfinal=None, wanted=NAMES, **kw):
    """{name: gradient} of those wanted, None where the call has no such argument."""
    silu = kw.pop("silu", True)
    inputs = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "initial_state": kw.pop("initial_state", None),
    }
    inputs = {n: leaf(t) if n in wanted else t for n, t in inputs.items()}
    state_len = None if dfinal is None else dfinal.shape[-1]
    result = kernel.causal_conv1d(
        **inputs, activation="silu" if silu else None, return_final_state=dfinal is not None,
        state_len=state_len, **kw,
    )  # fmt: skip
    pairs = list(zip(result, (dy, dfinal), strict=True) if dfinal is not None else [(result, dy)])
    pairs = [(y, grad) for y, grad in pairs if grad is not None and y.requires_grad]
    asked = [n for n in wanted if inputs[n] is not None]
    found = torch.autograd.grad(
        [y for y, _ in pairs], [inputs[n] for n in asked], [grad for _, grad in pairs]
    )
    return dict(zip(asked, found, strict=True))


def check(kernel, reference, x, dy, weight, bias=None, *, dfinal=None, **kw):
    """Every gradient is the fp64 one rounded once, and looks like what it is the gradient of.

    The magnitudes that rounding errors scale with are the same sums over absolute values, with
    |SiLU'| < 1.1. An fp32 z that is off by e moves SiLU'(z) by less than e: S bounds z. A sum over
    n rows adds at most n roundings of 2^-24, where 2^-21 stands for the sums of few terms.
    """
    got = gradients(kernel, x, dy, weight, bias, dfinal=dfinal, **kw)
    options = {"dfinal_state": dfinal, **kw}
    silu, initial = options.pop("silu", True), options.pop("initial_state", None)
    exact = reference.bwd(x, dy, weight, bias, silu=silu, initial_state=initial, **options)
    options["dfinal_state"] = None if dfinal is None else dfinal.abs()
    sums = reference.bwd(
        x.abs(), 1.1 * dy.double().abs(), weight.abs(), silu=False,
        initial_state=None if initial is None else initial.abs(), **options,
    )  # fmt: skip
    few = 1.0
    if silu:
        history = (
            None if initial is None else initial[..., initial.shape[-1] - weight.shape[1] + 1 :]
        )
        few += scale_of(rows_read(x, **options), weight, bias, history)
    many = few + x.shape[0] * x.shape[1] / 8
    like = {"x": x, "weight": weight, "bias": bias, "initial_state": initial}
    scales = {"x": few, "weight": many, "bias": many, "initial_state": few}
    for name, value, magnitude in zip(NAMES, exact, sums, strict=True):
        if like[name] is None:
            continue
        assert got[name].dtype == like[name].dtype, name
        assert_rounded(got[name], value, scales[name] * magnitude.nan_to_num())
    return got


def rows_read(x, cu_seqlens=None, seq_idx=None, **_):
    """x without the rows that are padding."""
    if cu_seqlens is not None:
        return x[:, : int(cu_seqlens[-1])]
    return x if seq_idx is None else x[seq_idx >= 0]


def case(device, *shape, dtype=torch.float32, W=4, L=4, N=None, states=True, **layouts):
    """x, dy, weight, bias and the two states' tensors of a call."""
    B, T, D = shape
    N = B if N is None else N
    x = randn(*shape, dtype=dtype, device=device, layout=layouts.get("x", "contiguous"))
    dy = randn(*shape, dtype=dtype, device=device, layout=layouts.get("dy", "contiguous"))
    weight, bias = randn(D, W, device=device), randn(D, device=device)
    if not states:
        return (x, dy, weight, bias), {}
    initial, dfinal = (randn(N, D, L, device=device) for _ in range(2))
    return (x, dy, weight, bias), {"initial_state": initial, "dfinal": dfinal}


def packed(lengths, device, index=torch.int32):
    return {"cu_seqlens": offsets(lengths, device, index)}


def test_the_oracle_is_the_derivative_of_the_forward(reference):
    """Independent of both: torch's own differentiation of the fp64 forward."""
    ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2, -1, -1], [-1, -1, -1, 0, 0, 0, 0, 0, 4]])
    for silu, L, packing in itertools.product(
        (False, True), (3, 4, 6, 12), ({}, {"seq_idx": ids}, {"cu_seqlens": None})
    ):
        B = 2
        if "cu_seqlens" in packing:
            B, packing = 1, packed([1, 0, 2, 5], "cpu")
        N = 4 if "cu_seqlens" in packing else B
        x, dy = (torch.randn(B, 9, 3, dtype=torch.float64) for _ in range(2))
        weight, bias = torch.randn(3, 4).double(), torch.randn(3).double()
        initial, dfinal = (torch.randn(N, 3, L).double() for _ in range(2))
        inputs = [leaf(t) for t in (x, weight, bias, initial)]
        y, final = reference.fwd(
            *inputs[:3], silu=silu, initial_state=inputs[3], state_len=L, **packing
        )
        outputs = [y, *(final[n] for n in range(N))]
        expected = torch.autograd.grad(outputs, inputs, [dy, *dfinal], materialize_grads=True)
        got = reference.bwd(x, dy, weight, bias, silu=silu, initial_state=initial,
                            dfinal_state=dfinal, **packing)  # fmt: skip
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
# 1..5 around the width; the rest around tiles of the kernels.
@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 8, 17, 40, 130])
def test_dense(kernel, reference, device, layout, dtype, T):
    tensors, states = case(device, 2, T, 40, dtype=dtype, x=layout, dy=layout)
    check(kernel, reference, *tensors, **states)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("W", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("silu", [False, True])
# One access a channel, one step of a block, parts of several blocks.
@pytest.mark.parametrize("shape", [(2, 8, 5), (1, 1048, 3), (2, 8208, 2), (1, 16392, 1)])
def test_channel_first_without_states(kernel, reference, device, dtype, W, silu, shape):
    tensors, _ = case(device, *shape, dtype=dtype, W=W, states=False, x="channel_first",
                      dy="channel_first")  # fmt: skip
    check(kernel, reference, *tensors, silu=silu)
    x, dy, weight, _ = tensors
    both = gradients(kernel, x, dy, weight, silu=silu)
    for name in ("x", "weight"):
        only = gradients(kernel, x, dy, weight, silu=silu, wanted=(name,))
        assert torch.equal(only[name], both[name])


def test_channel_first_rows_behind_the_end_add_nothing(kernel, device):
    """0 * inf would be NaN: the last rows' dx must not see the taps that reach past the end."""
    x, dy = (randn(1, 16, 3, device=device, layout="channel_first") for _ in range(2))
    weight = torch.tensor([math.inf, 2.0, 3.0, 0.5], device=device).expand(3, 4)
    dx = gradients(kernel, x, dy, weight, silu=False, wanted=("x",))["x"]
    last = 0.5 * dy[:, -3:]
    last[:, :2] += 3 * dy[:, -2:]
    last[:, :1] += 2 * dy[:, -1:]
    torch.testing.assert_close(dx[:, -3:], last)
    assert not dx[:, :-3].isfinite().any()


@pytest.mark.parametrize("layouts", list(itertools.product(LAYOUTS, LAYOUTS)), ids="-".join)
@pytest.mark.parametrize("D", [5, 64, 130])
def test_layouts_of_x_and_dy(kernel, reference, device, layouts, D):
    tensors, states = case(device, 1, 37, D, dtype=torch.bfloat16, x=layouts[0], dy=layouts[1])
    check(kernel, reference, *tensors, **states)


@pytest.mark.parametrize("W", range(1, 9))
@pytest.mark.parametrize("D", [1, 3, 8, 20, 257])
@pytest.mark.parametrize("silu", [False, True])
def test_width_and_channels(kernel, reference, device, W, D, silu):
    tensors, states = case(device, 1, 19, D, dtype=torch.bfloat16, W=W, L=W + 1)
    check(kernel, reference, *tensors, silu=silu, **states)


@pytest.mark.parametrize("D", [4128, 8192])
def test_model_widths(kernel, reference, device, D):
    tensors, states = case(device, 2, 9, D, dtype=torch.bfloat16)
    check(kernel, reference, *tensors, **states)


@pytest.mark.parametrize(
    "dtypes", list(itertools.product(FLOATS, (False, True), FLOATS, (None, False, True)))
)
def test_dtype_cube(kernel, reference, device, dtypes):
    """R58 too: the gradient of an fp32 weight is fp32 whatever x is."""
    x_dtype, wide_weight, state_dtype, wide_bias = dtypes
    (x, dy, weight, bias), states = case(device, 2, 11, 24, dtype=x_dtype)
    weight = weight if wide_weight else weight.to(x_dtype)
    bias = None if wide_bias is None else bias if wide_bias else bias.to(x_dtype)
    states = {name: state.to(state_dtype) for name, state in states.items()}
    check(kernel, reference, x, dy, weight, bias, **states)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("W", [1, 4, 8])
def test_float64_on_cpu(kernel, reference, device, emulated, W, layout):
    if device.type != "cpu" or emulated:
        pytest.skip("float64 is a CPU dtype")
    (x, dy, weight, bias), states = case(
        device, 2, 40, 24, dtype=torch.float64, W=W, L=8, x=layout, dy=layout
    )
    states = {name: state.double() for name, state in states.items()}
    check(kernel, reference, x, dy, weight.double(), bias.double(), **states)


GRADCHECKS = {
    "dense": {},
    "seq_idx": {"seq_idx": torch.tensor([[0, 0, 1, 1, 1, 2, -1], [-1, -1, 0, 0, 3, 3, 3]])},
    "cu_seqlens": packed([1, 0, 3, 2], "cpu"),
}


@pytest.mark.parametrize("packing", GRADCHECKS.values(), ids=GRADCHECKS.keys())
@pytest.mark.parametrize("silu", [None, "silu"])
@pytest.mark.parametrize("W, L", [(1, 0), (1, 2), (2, 1), (4, 3), (4, 4), (4, 12), (8, 9)])
@pytest.mark.parametrize("bias", [False, True])
def test_gradcheck(kernel, device, emulated, packing, silu, W, L, bias):
    """Numerically, in fp64, from every input to every output."""
    if device.type != "cpu" or emulated:
        pytest.skip("float64 is a CPU dtype")
    torch.use_deterministic_algorithms(False)  # NaN would hide in what gradcheck allocates
    B, N = (1, 4) if "cu_seqlens" in packing else (2, 2)

    def f(x, weight, initial, *bias):
        return kernel.causal_conv1d(
            x, weight, *bias, activation=silu, initial_state=initial, return_final_state=True,
            state_len=L + 2, **packing,
        )  # fmt: skip

    shapes = [(B, 7, 2), (2, W), (N, 2, L), *([(2,)] if bias else [])]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert gradcheck(f, inputs)


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
    """With a padded tail of NaN rows in x and dy: dx = 0 there, no part in any sum."""
    total = sum(lengths)
    tensors, kw = case(
        device, 1, total + 3, 24, dtype=torch.bfloat16, N=len(lengths), states=states,
        x=layout, dy=layout,
    )  # fmt: skip
    for tensor in tensors[:2]:
        tensor[:, total:] = NAN
    got = check(kernel, reference, *tensors, **packed(lengths, device, index), **kw)
    assert (got["x"][:, total:] == 0).all()


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
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_seq_idx(kernel, reference, device, ids, states, index):
    """Rows of padding hold NaN in x and dy."""
    seq_idx = torch.tensor([ids, [0] * 4 + [1] * 5], dtype=index, device=device)
    tensors, kw = case(device, 2, 9, 24, dtype=torch.bfloat16, states=states)
    for tensor in tensors[:2]:
        tensor[seq_idx < 0] = NAN
    got = check(kernel, reference, *tensors, seq_idx=seq_idx, **kw)
    assert (got["x"][seq_idx < 0] == 0).all()


def test_seq_idx_over_many_tiles(kernel, reference, device):
    lengths = [0, 90, 1, 2, 31, 33, 64]
    ids = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)], device=device)
    seq_idx = torch.stack([ids, torch.zeros_like(ids)])
    tensors, kw = case(device, 2, ids.numel(), 72, dtype=torch.bfloat16)
    check(kernel, reference, *tensors, seq_idx=seq_idx, **kw)


@pytest.mark.parametrize("poison", [NAN, math.inf, 1.0])
def test_gradients_to_other_sequences_are_zero(kernel, device, poison):
    """A loss on one sequence reaches no other, nor its state; and whatever the others hold in x, in
    dy and in their states, the sequence's own gradients keep their bits."""
    lengths = [5, 1, 9, 2, 30, 3]
    (x, _, weight, bias), kw = case(device, 1, 50, 64, dtype=torch.bfloat16, N=6)
    initial, cu = kw["initial_state"], offsets(lengths, device)
    ids = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths)).to(device)
    for n in range(6):
        own, dy = ids == n, torch.randn_like(x)
        alone = gradients(
            kernel, x[:, own], dy[:, own], weight, bias, initial_state=initial[n : n + 1]
        )
        dy[:, ~own] = 0
        got = gradients(kernel, x, dy, weight, bias, initial_state=initial, cu_seqlens=cu)
        others = torch.arange(6, device=device) != n
        assert (got["x"][:, ~own] == 0).all() and (got["initial_state"][others] == 0).all()
        foul, dfoul, states = x.clone(), dy.clone(), initial.clone()
        foul[:, ~own], dfoul[:, ~own], states[others] = poison, poison, poison
        got = gradients(kernel, foul, dfoul, weight, bias, initial_state=states, cu_seqlens=cu)
        assert torch.equal(got["x"][:, own], alone["x"])
        assert torch.equal(got["initial_state"][n], alone["initial_state"][0])
        alone = gradients(kernel, x[:, own], dy[:, own], weight, bias)
        got = gradients(kernel, foul, dfoul, weight, bias, seq_idx=ids[None])
        assert torch.equal(got["x"][:, own], alone["x"])


def test_several_batch_rows_under_one_set_of_offsets(kernel, device):
    """R14, R19: B > 1 with cu_seqlens is one packed row; a sequence may cross batch rows."""
    (x, dy, weight, bias), _ = case(device, 2, 12, 40, states=False)
    packing = packed([7, 10, 7], device)
    got = gradients(kernel, x, dy, weight, bias, **packing)
    flat = gradients(kernel, x.view(1, 24, 40), dy.view(1, 24, 40), weight, bias, **packing)
    assert got["x"].shape == x.shape
    for name in flat:
        assert torch.equal(got[name].flatten(), flat[name].flatten())


@pytest.mark.parametrize("pieces", [[1, 1, 1, 2], [2, 3], [4, 1], [1, 4], [0, 5]])
@pytest.mark.parametrize("L", [3, 4, 6])
def test_r22_chained_chunks_equal_one_call(kernel, device, emulated, pieces, L):
    """T < W-1: a gradient passes through the state from chunk to chunk."""
    float64 = device.type == "cpu" and not emulated
    x, weight, initial = randn(2, 5, 24), randn(24, 4), randn(2, 24, L)
    dy, dfinal = randn(2, 5, 24), randn(2, 24, L)
    tensors = [leaf(t.double() if float64 else t.to(device)) for t in (x, weight, initial)]
    dy, dfinal = (t.to(tensors[0]) for t in (dy, dfinal))
    rtol = 1e-13 if float64 else 1e-5

    def run(lengths):
        x, weight, state = tensors
        ys = []
        for part in x.split(lengths, 1):
            y, state = kernel.causal_conv1d(
                part, weight, activation="silu", initial_state=state, return_final_state=True,
                state_len=L,
            )  # fmt: skip
            ys.append(y)
        return torch.autograd.grad([torch.cat(ys, 1), state], tensors, [dy, dfinal])

    for whole, chained in zip(run([5]), run(pieces), strict=True):
        torch.testing.assert_close(chained, whole, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("T", [0, 1, 2, 3, 5, 33])
@pytest.mark.parametrize("L", [3, 4, 6, 50])
@pytest.mark.parametrize("final_len", [3, 4, 7, 60])
def test_every_column_of_both_states(kernel, reference, device, T, L, final_len):
    """Each column of a final state is some row of x, some column of the initial state, or zero."""
    (x, dy, weight, bias), kw = case(device, 2, T, 24, L=L)
    kw["dfinal"] = randn(2, 24, final_len, device=device)
    check(kernel, reference, x, dy, weight, bias, **kw)
    got = gradients(kernel, x, torch.zeros_like(dy), weight, bias, **kw)
    reached = torch.cat([got["initial_state"], got["x"].transpose(1, 2)], -1)
    count = min(final_len, L + T)
    expected = torch.zeros_like(reached)
    expected[..., L + T - count :] = kw["dfinal"][..., final_len - count :]
    assert torch.equal(reached, expected)


@pytest.mark.parametrize("final_len", [3, 4, 9])
def test_final_state_alone(kernel, reference, device, final_len):
    """y takes no part in the loss: its gradient is absent, not zeros."""
    (x, dy, weight, bias), kw = case(device, 2, 6, 24)
    dfinal = randn(2, 24, final_len, device=device)
    got = gradients(kernel, x, None, weight, bias, dfinal=dfinal,
                    initial_state=kw["initial_state"])  # fmt: skip
    exact = reference.bwd(x, torch.zeros_like(dy), weight, bias, silu=True, dfinal_state=dfinal,
                          initial_state=kw["initial_state"])  # fmt: skip
    for name, value in zip(NAMES, exact, strict=True):
        assert torch.equal(got[name].double(), value), name


def test_final_state_unused(kernel, reference, device):
    (x, dy, weight, bias), kw = case(device, 2, 6, 24)
    initial = leaf(kw["initial_state"])
    y, _ = kernel.causal_conv1d(
        x, weight, bias, activation="silu", initial_state=initial, return_final_state=True
    )
    (got,) = torch.autograd.grad(y, initial, dy)
    alone = gradients(kernel, x, dy, weight, bias, initial_state=initial)
    assert torch.equal(got, alone["initial_state"])


def test_oldest_column_of_a_wide_state_is_never_read(kernel, device):
    (x, dy, weight, bias), kw = case(device, 1, 5, 16, L=6)
    clean = gradients(kernel, x, dy, weight, bias, **kw)
    kw["initial_state"][..., :3] = NAN
    for name, gradient in gradients(kernel, x, dy, weight, bias, **kw).items():
        assert torch.equal(gradient, clean[name])


@pytest.mark.parametrize("dim", [0, 1, 2, None])
def test_r23_expanded_dy(kernel, reference, device, dim):
    """As sum and mean hand it over; dim None: all strides are 0."""
    (x, dy, weight, bias), kw = case(device, 3, 11, 40)
    shape = [1, 1, 1] if dim is None else [1 if d == dim else s for d, s in enumerate(dy.shape)]
    check(kernel, reference, x, randn(*shape, device=device).expand(dy.shape), weight, bias, **kw)


def test_r23_sum_is_ones(kernel, device):
    (x, dy, weight, bias), kw = case(device, 2, 9, 24)
    expected = gradients(kernel, x, torch.ones_like(dy), weight, bias,
                         initial_state=kw["initial_state"])  # fmt: skip
    inputs = [leaf(t) for t in (x, weight, bias, kw["initial_state"])]
    y = kernel.causal_conv1d(*inputs[:3], activation="silu", initial_state=inputs[3])
    y.sum().backward()
    for tensor, gradient in zip(inputs, expected.values(), strict=True):
        assert torch.equal(tensor.grad, gradient)


def test_r24_split_views(kernel, device):
    """q, k, v apart, then cat: dy is three column slices of one wide gradient."""
    D = 24
    x, weight = randn(1, 4, 3 * D, device=device), randn(3 * D, 4, device=device)
    r = torch.arange(1.0, 12 * D + 1, device=device).view(1, 4, 3 * D)

    def run(copied):
        a, w = leaf(x), leaf(weight)
        parts = [
            kernel.causal_conv1d(p.contiguous() if copied else p, q, activation="silu")
            for p, q in zip(a.split(D, 2), w.split(D, 0), strict=True)
        ]
        y = torch.cat(parts, 2)
        if copied:
            for part, dy in zip(parts, r.split(D, 2), strict=True):
                part.backward(dy.contiguous(), retain_graph=True)
        else:
            (y * r).sum().backward()
        return a.grad, w.grad

    for view, copy in zip(run(False), run(True), strict=True):
        assert torch.equal(view, copy)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_every_input_may_be_strided(kernel, device, index):
    lengths = [4, 0, 9, 2]
    (x, dy, weight, bias), kw = case(device, 1, 15, 24, N=4)
    cu = offsets(lengths, device, index)
    ids = torch.tensor([[0] * 7 + [1] * 8], dtype=index, device=device)
    tensors = (x, dy, weight, bias, kw["initial_state"], kw["dfinal"], cu, ids)
    results = []
    for x, dy, weight, bias, initial, dfinal, cu, ids in (tensors, map(every_other, tensors)):
        got = gradients(kernel, x, dy, weight, bias, initial_state=initial, dfinal=dfinal,
                        cu_seqlens=cu)  # fmt: skip
        results.append([*got.values(), *gradients(kernel, x, dy, weight, seq_idx=ids).values()])
    for plain, strided in zip(*results, strict=True):
        assert torch.equal(plain, strided)


def test_expanded_inputs(kernel, reference, device):
    """Their gradients have the expanded shape; autograd sums them."""
    dy = randn(3, 11, 40, device=device)
    x, weight = randn(1, 11, 40, device=device), randn(1, 4, device=device)
    bias, initial = randn(1, device=device), randn(1, 1, 4, device=device)
    check(kernel, reference, x.expand(3, 11, 40), dy, weight.expand(40, 4), bias.expand(40),
          initial_state=initial.expand(3, 40, 4))  # fmt: skip


@pytest.mark.parametrize("elements", range(1, 8))
@pytest.mark.parametrize("dtype", FLOATS)
def test_misaligned_buffers(kernel, device, dtype, elements):
    (x, dy, weight, bias), kw = case(device, 1, 21, 64, dtype=dtype)
    expected = gradients(kernel, x, dy, weight, bias, **kw)
    a, b, w, c, i, f = (at_offset(t, elements) for t in (x, dy, weight, bias, *kw.values()))
    got = gradients(kernel, a, b, w, c, initial_state=i, dfinal=f)
    for name in NAMES:
        assert torch.equal(got[name], expected[name])


@pytest.mark.parametrize(
    "wanted", [c for n in range(1, 5) for c in itertools.combinations(NAMES, n)], ids="-".join
)
@pytest.mark.parametrize("packing", ["dense", "cu_seqlens", "seq_idx"])
def test_only_what_needs_a_gradient(kernel, device, wanted, packing):
    """Frozen weights or states change no bit of the other gradients; R25: a state that needs none
    still takes part."""
    options = {
        "dense": {},
        "cu_seqlens": packed([20, 0, 13], device),
        "seq_idx": {"seq_idx": (torch.arange(33, device=device) // 10)[None]},
    }[packing]
    (x, dy, weight, bias), kw = case(device, 1, 33, 40, N=3 if packing == "cu_seqlens" else 1)
    everything = gradients(kernel, x, dy, weight, bias, **kw, **options)
    some = gradients(kernel, x, dy, weight, bias, wanted=wanted, **kw, **options)
    assert set(some) == set(wanted)
    for name, gradient in some.items():
        assert torch.equal(gradient, everything[name]), name


@pytest.mark.parametrize("wanted", NAMES)
def test_a_final_state_depends_on_inputs_alone(kernel, device, wanted):
    """Kept in a cache, it must not keep a graph alive that only weights are part of."""
    (x, _, weight, bias), kw = case(device, 1, 6, 24)
    call = {"x": x, "weight": weight, "bias": bias, "initial_state": kw["initial_state"]}
    call[wanted] = leaf(call[wanted])
    y, final = kernel.causal_conv1d(**call, return_final_state=True)
    assert y.requires_grad and final.requires_grad == (wanted in ("x", "initial_state"))


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8), (2, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("packing", ["dense", "cu_seqlens", "seq_idx"])
def test_empty(kernel, reference, device, shape, packing):
    if packing == "cu_seqlens":
        shape = (1, *shape[1:])
    options = {
        "dense": {},
        "cu_seqlens": packed([shape[1], 0] if shape[0] else [], device),
        "seq_idx": {"seq_idx": torch.zeros(shape[:2], dtype=torch.int32, device=device)},
    }[packing]
    N = options["cu_seqlens"].numel() - 1 if packing == "cu_seqlens" else None
    tensors, states = case(device, *shape, N=N)
    check(kernel, reference, *tensors, **states, **options)


def test_no_sequences(kernel, device):
    """N = 0: every row is padding."""
    (x, dy, weight, bias), kw = case(device, 1, 6, 16, N=0)
    got = gradients(kernel, x, dy, weight, bias, **kw, **packed([], device))
    assert got["initial_state"].shape == (0, 16, 4)
    for name in ("x", "weight", "bias"):
        assert (got[name] == 0).all(), name


def test_training_has_the_bits_of_inference(kernel, device):
    (x, _, weight, bias), kw = case(device, 2, 40, 72, dtype=torch.bfloat16)
    options = {"activation": "silu", "initial_state": kw["initial_state"],
               "return_final_state": True}  # fmt: skip
    expected = kernel.causal_conv1d(x, weight, bias, **options)
    got = kernel.causal_conv1d(leaf(x), leaf(weight), leaf(bias), **options)
    for a, b in zip(got, expected, strict=True):
        assert a.requires_grad and torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize("packing", ["dense", "cu_seqlens", "seq_idx"])
def test_r26_same_bits_in_every_run(kernel, device, packing):
    B, T, D = 4, 300, 1032
    if packing == "cu_seqlens":
        B = 1
    (x, dy, weight, bias), kw = case(device, B, T, D, dtype=torch.bfloat16, N=5 if B == 1 else B)
    options = {
        "dense": {},
        "cu_seqlens": packed([1, 200, 0, 2, 97], device),
        "seq_idx": {"seq_idx": (torch.arange(T, device=device) // 37).expand(B, T)},
    }[packing]
    expected = gradients(kernel, x, dy, weight, bias, **kw, **options)
    for _ in range(20):
        again = gradients(kernel, x, dy, weight, bias, **kw, **options)
        for name in NAMES:
            assert torch.equal(again[name], expected[name]), name


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_threads_agree_bitwise(kernel, device, threads):
    """However the work is cut between threads; R26."""
    if device.type != "cpu":
        pytest.skip("threads are the CPU backend's")
    (x, dy, weight, bias), kw = case(device, 1, 400, 700, dtype=torch.bfloat16, N=5)
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append(gradients(kernel, x, dy, weight, bias, **kw, **packed([1, 300, 0, 2, 97],
                                                                             device)))  # fmt: skip
    for other in results[1:]:
        for name in NAMES:
            assert torch.equal(results[0][name], other[name]), name


@pytest.mark.parametrize("T, D", list(itertools.product((128, 512), (256, 512, 768))))
def test_r27_shapes_that_other_kernels_got_wrong(kernel, device, T, D):
    """Against torch's own depthwise convolution in fp64."""
    (x, dy, weight, bias), _ = case(device, 1, T, D, dtype=torch.bfloat16, states=False)
    inputs = [leaf(t.double()) for t in (x, weight, bias)]
    padded = torch.nn.functional.pad(inputs[0].transpose(1, 2), (3, 0))
    y = torch.nn.functional.conv1d(padded, inputs[1][:, None], inputs[2], groups=D)
    y = torch.nn.functional.silu(y).transpose(1, 2)
    expected = torch.autograd.grad(y, inputs, dy.double())
    got = gradients(kernel, x, dy, weight, bias)
    few = 1 + scale_of(x, weight, bias)
    for name, value in zip(NAMES, expected, strict=False):
        terms = 1.1 * largest(dy) * (largest(weight) * 4 if name == "x" else largest(x) * T)
        many = few if name == "x" else few + T / 8
        assert_rounded(got[name], value, many * terms)


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
    T, N, kw = sum(lengths) + draw(st.integers(0, 2)), B, {"silu": draw(st.booleans())}
    x, dy = (
        randn(B, T, D, dtype=dtype, device=device, layout=draw(st.sampled_from(LAYOUTS)))
        for _ in range(2)
    )
    weight = randn(D, W, dtype=draw(st.sampled_from([dtype, torch.float32])), device=device)
    bias = randn(D, device=device) if draw(st.booleans()) else None
    if packing == "cu_seqlens":
        kw["cu_seqlens"], N = offsets(lengths, device), len(lengths)
        for tensor in (x, dy):
            tensor[:, sum(lengths) :] = NAN
    elif packing == "seq_idx":
        ids = [i for i, n in enumerate(lengths) for _ in range(n)]
        ids += [-1] * (T - len(ids))
        pad = min(draw(st.integers(0, 2)), T)
        seq_idx = torch.tensor([[-1] * pad + ids[pad:]] * B, device=device).reshape(B, T)
        kw["seq_idx"] = seq_idx.to(draw(st.sampled_from([torch.int32, torch.int64])))
        for tensor in (x, dy):
            tensor[seq_idx < 0] = NAN
    if draw(st.booleans()):
        kw["initial_state"] = randn(N, D, W - 1 + draw(st.integers(0, 2)), device=device,
                                    dtype=draw(st.sampled_from(FLOATS)))  # fmt: skip
    if draw(st.booleans()):
        state = kw.get("initial_state", x)
        kw["dfinal"] = randn(N, D, W - 1 + draw(st.integers(0, 9)), device=device,
                             dtype=state.dtype)  # fmt: skip
    check(kernel, reference, x, dy, weight, bias, **kw)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("packing", ["dense", "seq_idx", "cu_seqlens"])
def test_r61_checkpoint(kernel, device, reentrant, packing):
    """Recomputation gives the bits of the plain run, boundaries and initial state included."""
    options = {
        "dense": {},
        "cu_seqlens": packed([5, 0, 7], device),
        "seq_idx": {"seq_idx": (torch.arange(12, device=device) // 5)[None]},
    }[packing]
    (x, dy, weight, bias), kw = case(device, 1, 12, 24, N=3 if packing == "cu_seqlens" else 1)

    def block(x, weight, bias, initial):
        y, final = kernel.causal_conv1d(
            x * 2, weight, bias, activation="silu", initial_state=initial,
            return_final_state=True, **options,
        )  # fmt: skip
        return y * y, final

    def run(*checkpointed):
        inputs = [leaf(t) for t in (x, weight, bias, kw["initial_state"])]
        outputs = checkpoint(block, *inputs, use_reentrant=reentrant) if checkpointed else (
            block(*inputs)
        )  # fmt: skip
        torch.autograd.backward(outputs, (dy, kw["dfinal"]))
        return [t.grad for t in inputs]

    for plain, again in zip(run(), run(True), strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize("reentrant", [False, True])
def test_r61_checkpoint_around_a_cache(kernel, device, reentrant):
    """A cache fed with the detached final state advances once: recomputation writes it again with
    the same values."""
    (x, dy, weight, bias), _ = case(device, 1, 12, 24, states=False)

    def run(use):
        cache = torch.zeros(1, 24, 4, device=device)
        inputs = [leaf(t) for t in (x, weight, bias)]

        def block(x, weight, bias):
            y, final = kernel.causal_conv1d(x, weight, bias, return_final_state=True)
            cache.copy_(final.detach())
            return y

        use(block, *inputs).backward(dy)
        return cache, *(t.grad for t in inputs)

    plain = run(lambda f, *a: f(*a))
    again = run(lambda f, *a: checkpoint(f, *a, use_reentrant=reentrant))
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(plain[0][0], x[0, -4:].t())


def test_saved_tensors_are_guarded(kernel, device):
    """An input or a boundary that changed between forward and backward is an error."""
    (x, _, weight, _), _ = case(device, 1, 12, 24, states=False)
    cu = offsets([5, 7], device)
    x = leaf(x)
    y = kernel.causal_conv1d(x, weight, cu_seqlens=cu)
    cu[1] = 6
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = kernel.causal_conv1d(x, weight)
    y.mul_(2)  # the output is nobody's saved tensor
    y.sum().backward()
    assert x.grad is not None


def test_a_graph_runs_twice_when_it_is_kept(kernel, device):
    (x, dy, weight, _), _ = case(device, 1, 12, 24, states=False)
    x = leaf(x)
    y = kernel.causal_conv1d(x, weight)
    first = torch.autograd.grad(y, x, dy, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(y, x, dy)[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, x, dy)


def test_double_backward_is_refused(kernel, device):
    (x, _, weight, _), _ = case(device, 1, 12, 24, states=False)
    x, weight = leaf(x), leaf(weight)
    y = kernel.causal_conv1d(x, weight, activation="silu")
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight), create_graph=True)
    plain = torch.autograd.grad(kernel.causal_conv1d(x, weight, activation="silu").sum(), x)
    assert torch.equal(dx, plain[0])
    for first in (dx, dweight):
        with pytest.raises(NotImplementedError, match="must be differentiated once"):
            torch.autograd.grad(first.sum(), x, retain_graph=True)


def test_transforms_of_torch_func_are_refused(kernel, device):
    x, weight = randn(3, 2, 5, 8, device=device), randn(8, 4, device=device)
    state = randn(3, 2, 8, 4, device=device)

    def f(x):
        return kernel.causal_conv1d(x, weight).sum()

    with pytest.raises(NotImplementedError, match="x must not be inside a transform of torch.func"):
        torch.func.vmap(f)(x)
    with pytest.raises(NotImplementedError, match="must not be inside a transform of torch.func"):
        torch.func.vmap(lambda x, s: kernel.causal_conv1d_update(x, s, weight))(x[:, :, 0], state)
    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacrev):
        with pytest.raises(NotImplementedError, match="under a transform of torch.func"):
            transform(f)(x[0])
    with pytest.raises(NotImplementedError, match="torch.func"):
        torch.func.jvp(f, (x[0],), (x[0],))


def test_forward_mode_is_refused(kernel, device):
    x, weight = randn(2, 5, 8, device=device), randn(8, 4, device=device)
    state = randn(2, 8, 4, device=device)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match="x must not carry a tangent"):
            kernel.causal_conv1d(dual, weight)
        with torch.no_grad(), pytest.raises(NotImplementedError, match="x must not carry"):
            kernel.causal_conv1d(dual, weight)
        with pytest.raises(NotImplementedError, match="weight must not"):
            kernel.causal_conv1d_update(x[:, 0], state, forward_ad.make_dual(weight, weight))
        y = kernel.causal_conv1d(x, weight, out=torch.empty_like(x))
    assert torch.equal(y, kernel.causal_conv1d(x, weight))


SERVING = {
    "out": lambda d: torch.empty(2, 6, 8, device=d),
    "final_state_out": lambda d: torch.empty(2, 8, 4, device=d),
    "state_indices": lambda d: torch.tensor([1, 0], device=d),
    "has_initial_state": lambda d: torch.tensor([True, False], device=d),
}


@pytest.mark.parametrize("name", SERVING)
@pytest.mark.parametrize("wanted", NAMES)
def test_serving_options_are_refused_by_name(kernel, device, name, wanted):
    call = {
        "x": randn(2, 6, 8, device=device), "weight": randn(8, 4, device=device),
        "bias": randn(8, device=device), "initial_state": randn(2, 8, 4, device=device),
        name: SERVING[name](device),
    }  # fmt: skip
    kept = call["initial_state"].clone()
    call[wanted].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{name} must not be given where a gradient"):
        kernel.causal_conv1d(**call, return_final_state=True)
    assert f"{name} must not" in kernel.why_not("causal_conv1d", **call, return_final_state=True)
    assert torch.equal(call["initial_state"], kept)
    with torch.no_grad():
        kernel.causal_conv1d(**call, return_final_state=True)


def test_why_not_of_a_training_call(kernel, device):
    x, weight = leaf(randn(2, 6, 8, device=device)), randn(8, 4, device=device)
    assert kernel.why_not("causal_conv1d", x, weight, return_final_state=True) is None
    assert "weight must have shape" in kernel.why_not("causal_conv1d", x, weight[:7])
    with pytest.raises(ValueError, match="weight must have shape"):
        kernel.causal_conv1d(x, weight[:7])
    with kernel.checking(), pytest.raises(ValueError, match=r"cu_seqlens\[1\] = 13"):
        kernel.causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 13], device=device))


@pytest.mark.parametrize("seed", range(10))
def test_garbage_metadata_never_leaves_the_buffers(kernel, device, seed):
    """Random offsets and ids: guards around every written buffer stay as they were."""
    g = torch.Generator().manual_seed(seed)

    def junk(*shape):
        return torch.randint(-50, 50, shape, generator=g).to(device, torch.int32)

    (x, dy, weight, bias), kw = case(device, 1, 20, 16, N=5)
    for packing in ((junk(6), None), (None, junk(1, 20))):
        N = 5 if packing[1] is None else 1
        made = [torch.full((3, *t.shape), 7.0, device=device)
                for t in (x, weight, bias, kw["initial_state"][:N])]  # fmt: skip
        kernel.calls.bwd(x, dy, weight, bias, kw["initial_state"][:N], kw["dfinal"][:N], *packing,
                         *(m[1] for m in made), True)  # fmt: skip
        for guarded in made:
            assert (guarded[[0, 2]] == 7).all()
            assert not torch.isnan(guarded[1]).any()
