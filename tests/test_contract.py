"""Every refusal: its type, the argument it names, the value it got. And that the compiled host
code refuses the same calls by itself, so that nothing depends on Python having looked."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cases import FLOATS

bf16, f32, f64, i32 = torch.bfloat16, torch.float32, torch.float64, torch.int32


def good_fwd(device) -> dict:
    return {
        "x": torch.randn(2, 6, 8, device=device),
        "weight": torch.randn(8, 4, device=device),
        "initial_state": torch.randn(2, 8, 4, device=device),
    }


def good_update(device) -> dict:
    return {
        "x": torch.randn(2, 8, device=device),
        "conv_state": torch.randn(2, 8, 4, device=device),
        "weight": torch.randn(8, 4, device=device),
    }


def ones(*shape, dtype=f32):
    return lambda device: torch.ones(shape, dtype=dtype, device=device)


BAD_FWD = {
    "x type": ({"x": lambda d: [1.0]}, TypeError, "x must be a tensor, got list"),
    "x int": ({"x": ones(2, 6, 8, dtype=i32)}, TypeError, "x must be .* got torch.int32"),
    "x dims": ({"x": ones(2, 8)}, ValueError, r"x must be \[B, T, D\], got \[2, 8\]"),
    "weight dims": ({"weight": ones(8, 1, 4)}, ValueError, r"weight .* got \[8, 1, 4\]"),
    "weight D": ({"weight": ones(7, 4)}, ValueError, r"weight .* D=8 .* got \[7, 4\]"),
    "W 0": ({"weight": ones(8, 0)}, ValueError, r"W from 1 to 8, got \[8, 0\]"),
    "W 9": ({"weight": ones(8, 9)}, ValueError, r"W from 1 to 8, got \[8, 9\]"),
    "weight dtype": ({"weight": ones(8, 4, dtype=bf16)}, TypeError, "weight .* got torch.bfloat16"),
    "weight f64": ({"weight": ones(8, 4, dtype=f64)}, TypeError, "weight .* got torch.float64"),
    "bias shape": ({"bias": ones(4)}, ValueError, r"bias .* D=8, got \[4\]"),
    "bias dtype": ({"bias": ones(8, dtype=bf16)}, TypeError, "bias .* got torch.bfloat16"),
    "state N": ({"initial_state": ones(3, 8, 4)}, ValueError, r"initial_state .* got \[3, 8, 4\]"),
    "state D": ({"initial_state": ones(2, 4, 4)}, ValueError, r"initial_state .* got \[2, 4, 4\]"),
    "state L": ({"initial_state": ones(2, 8, 2)}, ValueError, r"L >= W-1 = 3, got \[2, 8, 2\]"),
    "state dtype": ({"initial_state": ones(2, 8, 4, dtype=i32)}, TypeError, "got torch.int32"),
    "final L": ({"final_state_out": ones(2, 8, 2)}, ValueError, r"final_state .* got \[2, 8, 2\]"),
    "final expanded": (
        {"final_state_out": lambda d: torch.ones(2, 8, 1, device=d).expand(2, 8, 4)},
        ValueError, "final_state .* expanded, got stride 0 in dim 2",
    ),
    "cu float": ({"cu_seqlens": ones(3)}, TypeError, "cu_seqlens .* got torch.float32"),
    "cu dims": ({"cu_seqlens": ones(1, 3, dtype=i32)}, ValueError, r"cu_seqlens .* got \[1, 3\]"),
    "cu none": ({"cu_seqlens": ones(0, dtype=i32)}, ValueError, r"cu_seqlens .* got \[0\]"),
    "seq_idx shape": ({"seq_idx": ones(2, 5, dtype=i32)}, ValueError, r"seq_idx .* got \[2, 5\]"),
    "seq_idx dtype": ({"seq_idx": ones(2, 6)}, TypeError, "seq_idx .* got torch.float32"),
    "both packings": (
        {"cu_seqlens": ones(3, dtype=i32), "seq_idx": ones(1, 12, dtype=i32)},
        ValueError, "cu_seqlens and seq_idx must not both be given, got both",
    ),
    "slots shape": (
        {"state_indices": ones(3, dtype=i32)}, ValueError, r"state_indices .* got \[3\]",
    ),
    "flags dtype": ({"has_initial_state": ones(2)}, TypeError, "has_initial_state must be bool"),
    "flags shape": (
        {"has_initial_state": ones(3, dtype=torch.bool)}, ValueError, r"has_initial_state .* \[3\]",
    ),
    "out shape": ({"out": ones(2, 6, 4)}, ValueError, r"out .* \[2, 6, 8\], got \[2, 6, 4\]"),
    "out dtype": ({"out": ones(2, 6, 8, dtype=bf16)}, TypeError, "out .* got torch.bfloat16"),
    "out expanded": (
        {"out": lambda d: torch.ones(2, 1, 8, device=d).expand(2, 6, 8)},
        ValueError, "out .* expanded, got stride 0 in dim 1",
    ),
    "activation": ({"activation": lambda d: "gelu"}, ValueError, "activation .* got 'gelu'"),
    "activation True": ({"activation": lambda d: ["silu"]}, ValueError, "activation .* got"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FWD.values(), ids=BAD_FWD.keys())
def test_fwd_refuses(kernel, device, case):
    changes, error, text = case
    call = good_fwd(device) | {name: make(device) for name, make in changes.items()}
    with pytest.raises(error, match=text):
        kernel.causal_conv1d(**call)
    assert kernel.why_not("causal_conv1d", **call)
    if "activation" not in changes and "x" not in changes:
        assert refused_by_the_op(kernel, "fwd", fwd_args(call))


def fwd_args(call: dict) -> tuple:
    x = call["x"]
    if "cu_seqlens" in call:
        x = x.view(1, -1, x.shape[-1])
    out = call.get("out", torch.empty_like(x))
    names = ("weight", "bias", "initial_state", "cu_seqlens", "seq_idx", "state_indices",
             "has_initial_state")  # fmt: skip
    return (x, *(call.get(n) for n in names), out, call.get("final_state_out"), True)


def refused_by_the_op(kernel, name: str, args: tuple) -> bool:
    with pytest.raises(RuntimeError):
        getattr(kernel.calls, name)(*args)
    return True


BAD_UPDATE = {
    "x dims": ({"x": ones(2, 8, 1, 1)}, ValueError, r"x must be \[B, D\] or \[B, D, T\]"),
    "x varlen dims": (
        {"x": ones(2, 8, 1), "cu_seqlens": ones(3, dtype=i32)}, ValueError, r"\[T_total, D\]",
    ),
    "state rows": ({"conv_state": ones(3, 8, 4)}, ValueError, r"conv_state .* got \[3, 8, 4\]"),
    "state L": ({"conv_state": ones(2, 8, 2)}, ValueError, r"L >= W-1 = 3, got \[2, 8, 2\]"),
    "state dtype": ({"conv_state": ones(2, 8, 4, dtype=i32)}, TypeError, "got torch.int32"),
    "state expanded": (
        {"conv_state": lambda d: torch.ones(1, 8, 4, device=d).expand(2, 8, 4)},
        ValueError, "conv_state .* expanded, got stride 0 in dim 0",
    ),
    "slots": ({"conv_state_indices": ones(3, dtype=i32)}, ValueError, r"got \[3\]"),
    "slots dtype": ({"conv_state_indices": ones(2)}, TypeError, "got torch.float32"),
    "both cursors": (
        {"cache_seqlens": ones(2, dtype=i32), "num_accepted_tokens": ones(2, dtype=i32)},
        ValueError, "must not both be given",
    ),
    "circular nothing": (
        {"conv_state": ones(2, 8, 0), "weight": ones(8, 1), "cache_seqlens": ones(2, dtype=i32)},
        ValueError, "L >= 1 when cache_seqlens is given, got L=0",
    ),
    "out": ({"out": ones(2, 4)}, ValueError, r"out .* got \[2, 4\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_UPDATE.values(), ids=BAD_UPDATE.keys())
def test_update_refuses(kernel, device, case):
    changes, error, text = case
    call = good_update(device) | {name: make(device) for name, make in changes.items()}
    with pytest.raises(error, match=text):
        kernel.causal_conv1d_update(**call)
    assert kernel.why_not(kernel.causal_conv1d_update, **call)
    names = ("x", "conv_state", "weight", "bias", "cache_seqlens", "conv_state_indices",
             "cu_seqlens", "num_accepted_tokens")  # fmt: skip
    out = call.get("out", torch.empty_like(call["x"]))
    assert refused_by_the_op(kernel, "update", (*(call.get(n) for n in names), out, True))


def good_bwd(device) -> dict:
    call = good_fwd(device)
    call |= {"dy": call["x"].clone(), "bias": torch.randn(8, device=device)}
    call["dfinal_state"] = torch.randn(2, 8, 7, device=device)
    made = {f"d{n}": torch.empty_like(call[n]) for n in ("x", "weight", "bias", "initial_state")}
    return call | made


BAD_BWD = {
    "x dims": ({"x": ones(2, 8)}, ValueError, r"x must be \[B, T, D\], got \[2, 8\]"),
    "weight": ({"weight": ones(7, 4)}, ValueError, r"weight .* D=8 .* got \[7, 4\]"),
    "dy shape": ({"dy": ones(2, 5, 8)}, ValueError, r"dy must have x's shape .* got \[2, 5, 8\]"),
    "dy dtype": ({"dy": ones(2, 6, 8, dtype=bf16)}, TypeError, "dy must .* got torch.bfloat16"),
    "dfinal L": ({"dfinal_state": ones(2, 8, 2)}, ValueError, r"dfinal_state .* got \[2, 8, 2\]"),
    "dfinal dtype": ({"dfinal_state": ones(2, 8, 4, dtype=i32)}, TypeError, "dfinal_state .* got"),
    "dx shape": ({"dx": ones(2, 6, 7)}, ValueError, r"dx must have x's shape .* got \[2, 6, 7\]"),
    "dx dtype": ({"dx": ones(2, 6, 8, dtype=bf16)}, TypeError, "dx must have x's dtype"),
    "dx expanded": (
        {"dx": lambda d: torch.ones(2, 1, 8, device=d).expand(2, 6, 8)},
        ValueError, "dx is written and must not be expanded, got stride 0 in dim 1",
    ),
    "dweight shape": ({"dweight": ones(8, 3)}, ValueError, r"dweight must .* weight's .* \[8, 3\]"),
    "dweight dtype": (
        {"dweight": ones(8, 4, dtype=bf16)}, TypeError, "dweight must have weight's dtype",
    ),
    "dbias shape": ({"dbias": ones(4)}, ValueError, r"dbias must have bias's shape .* got \[4\]"),
    "dbias alone": ({"bias": None}, ValueError, "dbias must come with bias, got no bias"),
    "dinitial shape": (
        {"dinitial_state": ones(2, 8, 3)}, ValueError, r"dinitial_state .* got \[2, 8, 3\]",
    ),
    "dinitial dtype": (
        {"dinitial_state": ones(2, 8, 4, dtype=bf16)}, TypeError, "dinitial_state must have init",
    ),
    "dinitial alone": (
        {"initial_state": None}, ValueError, "dinitial_state must come with initial_state",
    ),
    "both packings": (
        {"cu_seqlens": ones(3, dtype=i32), "seq_idx": ones(2, 6, dtype=i32)},
        ValueError, "cu_seqlens and seq_idx must not both be given, got both",
    ),
    "cu of a batch": (
        {"cu_seqlens": ones(3, dtype=i32)}, ValueError, r"x must be \[1, T, D\] when cu_seqlens",
    ),
    "seq_idx": ({"seq_idx": ones(2, 5, dtype=i32)}, ValueError, r"seq_idx .* got \[2, 5\]"),
}  # fmt: skip
BWD = ("x", "dy", "weight", "bias", "initial_state", "dfinal_state", "cu_seqlens", "seq_idx",
       "dx", "dweight", "dbias", "dinitial_state")  # fmt: skip


@pytest.mark.parametrize("case", BAD_BWD.values(), ids=BAD_BWD.keys())
def test_bwd_refuses(kernel, device, case):
    changes, error, text = case
    call = good_bwd(device)
    call |= {name: make and make(device) for name, make in changes.items()}
    args = (*(call.get(name) for name in BWD), True)
    with pytest.raises(error, match=text):
        kernel.calls.call(kernel.calls.bwd, *args)
    assert refused_by_the_op(kernel, "bwd", args)


@pytest.mark.parametrize(
    "written, other",
    [(w, o) for w in BWD[8:] for o in BWD if o not in (w, "cu_seqlens", "seq_idx")],
)
def test_bwd_writes_nothing_else(kernel, device, written, other):
    """A gradient that shares an element with any other tensor is refused."""
    call = good_bwd(device)
    buffer = torch.zeros(400, device=device)
    for name, start in ((written, 0), (other, 1)):
        shape, stride = call[name].shape, call[name].stride()
        call[name] = buffer.as_strided(shape, stride, start)
    args = (*(call.get(name) for name in BWD), True)
    with pytest.raises(ValueError, match="must not overlap"):
        kernel.calls.call(kernel.calls.bwd, *args)
    assert refused_by_the_op(kernel, "bwd", args)


def value(it):
    return lambda device: it


# Arguments so wrong that no buffer can be sized by them.
MALFORMED = {
    "cu list": ({"cu_seqlens": value([0, 12])}, TypeError, "cu_seqlens must be a tensor, got list"),
    "cu scalar": ({"cu_seqlens": ones(dtype=i32)}, ValueError, r"cu_seqlens .* got \[\]"),
    "x scalar": ({"x": ones()}, ValueError, r"x must be \[B, T, D\], got \[\]"),
    "weight list": ({"weight": value([1.0])}, TypeError, "weight must be a tensor, got list"),
    "weight scalar": ({"weight": ones()}, ValueError, r"weight .* got \[\]"),
    "bias float": ({"bias": value(0.5)}, TypeError, "bias must be a tensor, got float"),
    "state list": ({"initial_state": value([0])}, TypeError, "initial_state must .* got list"),
    "final list": ({"final_state_out": value([0])}, TypeError, "final_state must .* got list"),
    "out list": ({"out": value([0])}, TypeError, "out must be a tensor, got list"),
    "len short": ({"state_len": value(2)}, ValueError, "state_len must be at least 3, got 2"),
    "len below 0": ({"state_len": value(-1)}, ValueError, "state_len must be .* got -1"),
    "len text": ({"state_len": value("4")}, TypeError, "state_len must be an int, got str"),
    "sparse": ({"x": lambda d: torch.ones(2, 6, 8, device=d).to_sparse()}, ValueError,
               "x must be strided, got torch.sparse_coo"),
    "slots alone": (
        {"initial_state": value(None), "state_indices": ones(2, dtype=i32)},
        ValueError, "state_indices must come with the pool .* got initial_state=None",
    ),
    "flags alone": (
        {"initial_state": value(None), "has_initial_state": ones(2, dtype=torch.bool)},
        ValueError, "has_initial_state must come with initial_state, got initial_state=None",
    ),
}  # fmt: skip


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("case", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_arguments_are_named(kernel, device, case, checked):
    changes, error, text = case
    call = good_fwd(device) | {name: make(device) for name, make in changes.items()}
    with kernel.checking(checked), pytest.raises(error, match=text):
        kernel.causal_conv1d(**call, return_final_state=True)
    assert kernel.why_not("causal_conv1d", **call, return_final_state=True)


def test_varlen_states_refuses(kernel, device):
    x, cu = torch.randn(6, 8, device=device), torch.tensor([0, 6], device=device)
    for args, error, text in (
        (([1.0], cu, 3), TypeError, "x must be a tensor, got list"),
        ((x[0, 0], cu, 3), ValueError, r"x must be \[T_total, D\], got \[\]"),
        ((x[None], cu, 3), ValueError, r"x must be \[T_total, D\], got \[1, 6, 8\]"),
        ((x, [0, 6], 3), TypeError, "cu_seqlens must be a tensor, got list"),
        ((x, cu.float(), 3), TypeError, "cu_seqlens .* got torch.float32"),
        ((x, cu, -1), ValueError, "state_len must be at least 0, got -1"),
        ((x, cu, 1.5), TypeError, "state_len must be an int, got float"),
        ((x.int(), cu, 3), TypeError, "x must be .* got torch.int32"),
        ((x.clone().requires_grad_(), cu, 3), NotImplementedError, "x must not require"),
    ):
        with pytest.raises(error, match=text):
            kernel.causal_conv1d_varlen_states(*args)
    with kernel.checking(), pytest.raises(ValueError, match=r"cu_seqlens\[1\] = 7"):
        kernel.causal_conv1d_varlen_states(x, torch.tensor([0, 7], device=device), 3)


DTYPES = st.sampled_from([*FLOATS, f64, i32, torch.int64, torch.bool])


@st.composite
def near(draw, *shape, dtype):
    """(shape, dtype, expanded), mostly the right ones."""
    shape = list(shape)
    change = draw(st.sampled_from(["no"] * 12 + ["size", "size", "dims", "dtype", "dtype", "0"]))
    if change == "size" and shape:
        shape[draw(st.integers(0, len(shape) - 1))] += draw(st.sampled_from([-1, 1]))
    elif change == "dims":
        shape = shape[1:] if draw(st.booleans()) else [1, *shape]
    dtype = draw(DTYPES) if change == "dtype" else dtype
    return tuple(max(size, 0) for size in shape), dtype, change == "0"


def made(spec, device):
    if spec is None:
        return None
    shape, dtype, expanded = spec
    if expanded and shape:
        return torch.zeros(1, *shape[1:], dtype=dtype, device=device).expand(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def agree(kernel, name: str, args: tuple) -> None:
    """The contract and the compiled host code accept and refuse the same calls."""
    refusals = []
    op = getattr(kernel.calls, name)
    for call in (kernel.calls.RULES[op], op):
        try:
            call(*args)
            refusals.append(None)
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            refusals.append(str(error).split("\n")[0])
    contract, host = refusals
    assert (contract is None) == (host is None), f"contract: {contract}; host: {host}"


FUZZ = settings(
    max_examples=400, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@FUZZ
@given(data=st.data())
def test_contract_and_host_agree_on_fwd(kernel, device, emulated, data):
    if emulated:
        pytest.skip("CUDA kernels under CPU tensors, whose float64 the contract allows")
    draw = data.draw
    dtype = draw(st.sampled_from([*FLOATS, f64]))
    wide = draw(st.sampled_from([dtype, f32]))
    packed, slots = draw(st.booleans()), draw(st.booleans())
    B, T, D, W = 1 if packed else 2, 5, 6, draw(st.sampled_from([1, 4, 8]))
    N, L = 3 if packed else B, W
    S = N + 2 if slots else N

    def maybe(*shape, dtype):
        return draw(st.none() | near(*shape, dtype=dtype))

    specs = (
        draw(near(B, T, D, dtype=dtype)),
        draw(near(D, W, dtype=wide)),
        maybe(D, dtype=wide),
        maybe(S, D, L, dtype=bf16),
        draw(near(N + 1, dtype=i32)) if packed else None,
        None if packed and draw(st.integers(0, 5)) else maybe(B, T, dtype=i32),
        draw(near(N, dtype=i32)) if slots else None,
        maybe(N, dtype=torch.bool),
        draw(near(B, T, D, dtype=dtype)),
        maybe(S, D, L, dtype=f32),
    )
    agree(kernel, "fwd", (*(made(spec, device) for spec in specs), True))


@FUZZ
@given(data=st.data())
def test_contract_and_host_agree_on_bwd(kernel, device, emulated, data):
    if emulated:
        pytest.skip("CUDA kernels under CPU tensors, whose float64 the contract allows")
    draw = data.draw
    dtype = draw(st.sampled_from([*FLOATS, f64]))
    wide = draw(st.sampled_from([dtype, f32]))
    packed = draw(st.booleans())
    B, T, D, W = 1 if packed else 2, 5, 6, draw(st.sampled_from([1, 4, 8]))
    N, L = 3 if packed else B, W

    def maybe(*shape, dtype):
        return draw(st.none() | near(*shape, dtype=dtype))

    specs = (
        draw(near(B, T, D, dtype=dtype)),
        draw(near(B, T, D, dtype=dtype)),
        draw(near(D, W, dtype=wide)),
        maybe(D, dtype=wide),
        maybe(N, D, L, dtype=bf16),
        maybe(N, D, L + 1, dtype=f32),
        draw(near(N + 1, dtype=i32)) if packed else None,
        None if packed and draw(st.integers(0, 5)) else maybe(B, T, dtype=i32),
        maybe(B, T, D, dtype=dtype),
        maybe(D, W, dtype=wide),
        maybe(D, dtype=wide),
        maybe(N, D, L, dtype=bf16),
    )
    agree(kernel, "bwd", (*(made(spec, device) for spec in specs), True))


@FUZZ
@given(data=st.data())
def test_contract_and_host_agree_on_update(kernel, device, emulated, data):
    if emulated:
        pytest.skip("CUDA kernels under CPU tensors, whose float64 the contract allows")
    draw = data.draw
    dtype = draw(st.sampled_from([*FLOATS, f64]))
    kind, slots = draw(st.sampled_from(["one", "many", "varlen"])), draw(st.booleans())
    N, T, D, W = 3, 2, 6, draw(st.sampled_from([1, 4, 8]))
    shape = {"one": (N, D), "many": (N, D, T), "varlen": (7, D)}[kind]

    def maybe(*shape, dtype):
        return draw(st.none() | near(*shape, dtype=dtype))

    specs = (
        draw(near(*shape, dtype=dtype)),
        draw(near(N + 2 if slots else N, D, W - 1 + draw(st.integers(0, 1)), dtype=bf16)),
        draw(near(D, W, dtype=dtype)),
        maybe(D, dtype=f32),
        maybe(N, dtype=i32),
        draw(near(N, dtype=i32)) if slots else None,
        draw(near(N + 1, dtype=i32)) if kind == "varlen" else None,
        maybe(N, dtype=torch.int64),
        draw(near(*shape, dtype=dtype)),
    )
    agree(kernel, "update", (*(made(spec, device) for spec in specs), True))


@settings(parent=FUZZ, max_examples=300)
@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 3), pitch=st.integers(1, 12),
    starts=st.tuples(st.integers(0, 40), st.integers(0, 40)), same_pitch=st.booleans(),
)  # fmt: skip
@example(sizes=(1, 3, 4), pitch=8, starts=(0, 4), same_pitch=True)
@example(sizes=(1, 3, 4), pitch=8, starts=(0, 3), same_pitch=True)
def test_contract_and_host_agree_on_overlap(kernel, device, sizes, pitch, starts, same_pitch):
    """Never accepted when elements are shared; x and out are any two views of one buffer."""
    B, T, D = sizes
    base = torch.arange(400.0, device=device)
    pitches = (pitch, pitch if same_pitch else pitch + 1)
    x, out = (
        base.as_strided((B, T, D), (T * p, p, 1), start)
        for start, p in zip(starts, pitches, strict=True)
    )
    shared = set(x.flatten().tolist()) & set(out.flatten().tolist())
    args = (x, torch.ones(D, 1, device=device), *[None] * 6, out, None, False)
    agree(kernel, "fwd", args)
    if shared:
        with pytest.raises(ValueError, match="out must not overlap x"):
            kernel.calls.RULES[kernel.calls.fwd](*args)


def test_overlap_is_refused_and_neighbouring_columns_are_not(kernel, device):
    base = torch.randn(2, 6, 24, device=device)
    x, w = base[..., :8], torch.randn(8, 4, device=device)
    with pytest.raises(ValueError, match="out must not overlap x"):
        kernel.causal_conv1d(x, w, out=x)
    with pytest.raises(ValueError, match="out must not overlap x"):
        kernel.causal_conv1d(x, w, out=base[..., 4:12])
    expected = kernel.causal_conv1d(x.clone(), w)
    assert torch.equal(kernel.causal_conv1d(x, w, out=base[..., 8:16]), expected)
    state = torch.randn(3, 8, 4, device=device)
    with pytest.raises(ValueError, match="final_state must not overlap initial_state"):
        kernel.causal_conv1d(x, w, initial_state=state[:2], final_state_out=state[1:])
    with pytest.raises(ValueError, match="conv_state must not overlap x"):
        flat = torch.randn(2, 8, 4, device=device)
        kernel.causal_conv1d_update(flat[..., 0], flat, w)


def test_unviewable_batch_with_offsets(kernel, device):
    x = torch.randn(6, 2, 8, device=device).transpose(0, 1)
    cu = torch.tensor([0, 12], dtype=i32, device=device)
    with pytest.raises(ValueError, match=r"x must be viewable as \[1, B\*T, D\]"):
        kernel.causal_conv1d(x, torch.randn(8, 4, device=device), cu_seqlens=cu)


@pytest.mark.parametrize("name", ["x", "conv_state", "weight", "bias"])
def test_update_refuses_gradients_by_name(kernel, device, name):
    """R61: an in-place state must not be advanced under a graph."""
    call = good_update(device) | {"bias": torch.randn(8, device=device)}
    before = call["conv_state"].clone()
    call[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{name} must not require a gradient"):
        kernel.causal_conv1d_update(**call)
    assert torch.equal(call["conv_state"].detach(), before)
    assert f"{name} must not" in kernel.why_not("causal_conv1d_update", **call)


def test_a_cpu_build_refuses_cuda_tensors(kernel, device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    if device.type == "cuda":
        pytest.skip("the CUDA build serves both")
    with FakeTensorMode():
        x, w = torch.empty(1, 4, 8, device="cuda"), torch.empty(8, 4, device="cuda")
        with pytest.raises(NotImplementedError, match="x must be on cpu, .* got cuda:0"):
            kernel.causal_conv1d(x, w)
        assert "x must be on cpu" in kernel.why_not("causal_conv1d", x, w)


def test_other_devices_are_refused(kernel, device):
    x = torch.empty(1, 4, 8, device="meta")
    with pytest.raises((ValueError, NotImplementedError), match="weight|x must be on"):
        kernel.causal_conv1d(x, torch.randn(8, 4))
    if device.type == "cuda":
        with pytest.raises(NotImplementedError, match="float64 runs on cpu only"):
            kernel.causal_conv1d(
                torch.zeros(1, 4, 8, dtype=f64, device=device),
                torch.zeros(8, 4, dtype=f64, device=device),
            )
        with pytest.raises(ValueError, match="weight must be on x's device cuda:0, got cpu"):
            kernel.causal_conv1d(torch.zeros(1, 4, 8, device=device), torch.zeros(8, 4))


def test_why_not_is_none_and_touches_nothing(kernel, device):
    call = good_update(device)
    before = call["conv_state"].clone()
    assert kernel.why_not("causal_conv1d_update", **call) is None
    assert torch.equal(call["conv_state"], before)
    assert kernel.why_not("causal_conv1d", **good_fwd(device), return_final_state=True) is None
    with pytest.raises(ValueError, match="op must be"):
        kernel.why_not("conv")


BAD_VALUES = [
    ({"cu_seqlens": [0, 4, 3, 12]}, r"cu_seqlens\[2\] = 3 after 4"),
    ({"cu_seqlens": [0, 4, 13]}, r"T=12\], got cu_seqlens\[2\] = 13"),
    ({"cu_seqlens": [-1, 4, 12]}, r"cu_seqlens\[0\] = -1"),
    ({"seq_idx": [[0] * 6 + [1] * 3 + [0] * 3]}, r"seq_idx\[0, 9\] = 0 after 1 at 8"),
    ({"seq_idx": [[0] * 6 + [-1] + [1] * 5]}, r"seq_idx\[0, 7\] = 1 after 0 at 5"),
]


@pytest.mark.parametrize("values, text", BAD_VALUES)
def test_checking_names_the_first_bad_entry(kernel, device, values, text):
    x, w = torch.randn(1, 12, 8, device=device), torch.randn(8, 4, device=device)
    packing = {k: torch.tensor(v, dtype=i32, device=device) for k, v in values.items()}
    kernel.causal_conv1d(x, w, **packing)  # unchecked: any values, but no fault
    with kernel.checking(), pytest.raises(ValueError, match=text):
        kernel.causal_conv1d(x, w, **packing)


def test_environment_variable_checks(kernel, device):
    program = """
import sys, torch
from pathlib import Path
from kernels import get_local_kernel
k = get_local_kernel(Path(sys.argv[1]), backend="cpu")
x, w, cu = torch.ones(1, 4, 8), torch.ones(8, 4), torch.tensor([0, 5])
try:
    k.causal_conv1d(x, w, cu_seqlens=cu)
except ValueError as error:
    print(error)
"""
    if device.type == "cuda":
        pytest.skip("one build is enough")
    said = [
        subprocess.run(
            [sys.executable, "-c", program, os.path.dirname(kernel.__file__)],
            env={**os.environ, "SHORT_CONV_CHECK": flag}, check=True, capture_output=True,
            text=True,
        ).stdout
        for flag in ("1", "0")
    ]  # fmt: skip
    assert "got cu_seqlens[1] = 5" in said[0] and said[1] == ""


def test_checking_slots_and_counts(kernel, device):
    call = good_update(device)
    with kernel.checking():
        with pytest.raises(ValueError, match=r"conv_state_indices\[1\] = conv_state_indices\[0\]"):
            kernel.causal_conv1d_update(
                **call, conv_state_indices=torch.tensor([1, 1], device=device)
            )
        with pytest.raises(ValueError, match=r"\[0, 1\], got num_accepted_tokens\[1\] = 2"):
            kernel.causal_conv1d_update(
                **call, num_accepted_tokens=torch.tensor([1, 2], device=device)
            )
        kernel.causal_conv1d_update(**call, conv_state_indices=torch.tensor([1, 0], device=device))


@pytest.mark.parametrize("seed", range(20))
def test_garbage_metadata_never_leaves_the_buffers(kernel, device, seed):
    """Random offsets, ids and slots: guards around every written buffer stay as they were, and
    the context survives."""
    g = torch.Generator().manual_seed(seed)

    def junk(*shape):
        return torch.randint(-50, 50, shape, generator=g).to(device, i32)

    x, w = torch.randn(1, 20, 16, device=device), torch.randn(16, 4, device=device)
    guard = torch.full((22, 16), 7.0, device=device)
    out = guard[1:21].unsqueeze(0)
    states = torch.full((7, 16, 4), 7.0, device=device)
    pool = states[1:6]
    kw = {"initial_state": pool, "final_state_out": pool, "state_indices": junk(5)}
    kernel.causal_conv1d(x, w, cu_seqlens=junk(6), out=out, **kw)
    kernel.causal_conv1d(x, w, seq_idx=junk(1, 20), out=out)
    kernel.causal_conv1d_update(
        x[0], pool, w, cu_seqlens=junk(6), conv_state_indices=junk(5),
        num_accepted_tokens=junk(5), out=out[0],
    )  # fmt: skip
    kernel.causal_conv1d_update(x[0, :5], pool, w, cache_seqlens=junk(5))
    assert (guard[[0, -1]] == 7).all() and (states[[0, -1]] == 7).all()


def test_a_gradient_on_cuda_needs_rows_that_fit_32_bits(kernel):
    x = torch.empty(1, 2**31 - 64, 1, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(1, 4, device="meta", dtype=torch.bfloat16)
    rest = (None,) * 9
    with pytest.raises(NotImplementedError, match=r"x must have T < .* got T=2147483584"):
        kernel.contract.bwd(x, x, weight, *rest, True)
    kernel.contract.bwd(x[:, 1:], x[:, 1:], weight, *rest, True)
