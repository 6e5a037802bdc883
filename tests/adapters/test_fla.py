"""fla's functions and its ShortConvolution on the kernels: the real package where it can be
imported, and modules of the same shape where it cannot."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn.functional import conv1d, silu

pytest.importorskip("transformers", minversion="5.22")
from short_conv_transformers import fla as adapter  # noqa: E402

OPS = "fla.modules.causal_conv1d.ops"
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def ordinary(x, weight, bias=None, activation=None, history=None):
    """[T, D] through the definition in fp64, and the last W inputs."""
    D, W = weight.shape
    past = x.new_zeros(W, D) if history is None else history.t()
    rows = torch.cat([past, x]).double()
    b = None if bias is None else bias.double()
    if len(x) == 0:
        return x, rows[-W:].t().to(x.dtype)
    y = conv1d(rows[1:].t()[None], weight.double()[:, None], b, groups=D)[0].t()
    return (y if activation is None else silu(y)).to(x.dtype), rows[-W:].t().to(x.dtype)


class StandIn:
    """fla's two functions as it documents them, and its module's use of them."""

    def causal_conv1d(x, weight=None, bias=None, residual=None, initial_state=None,
                      output_final_state=False, activation=None, backend="triton",
                      cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None,
                      **kwargs):  # fmt: skip
        rows = x.flatten(2)
        parts = list(rows) if cu_seqlens is None else rows[0].split(cu_seqlens.diff().tolist())
        states = [None] * len(parts) if initial_state is None else initial_state
        found = [
            ordinary(part, weight, bias, activation, state)
            for part, state in zip(parts, states, strict=True)
        ]
        y = torch.stack([f[0] for f in found]) if cu_seqlens is None else None
        y = torch.cat([f[0] for f in found])[None] if y is None else y
        y = y.view(x.shape)
        y = y if residual is None else y + residual
        return y, torch.stack([f[1] for f in found]) if output_final_state else None

    def causal_conv1d_update(x, cache, residual=None, weight=None, bias=None, activation=None):
        rows = x.reshape(-1, weight.shape[0])
        found = [
            ordinary(row[None], weight, bias, activation, state)
            for row, state in zip(rows, cache, strict=True)
        ]
        cache.copy_(torch.stack([f[1] for f in found]))
        y = torch.cat([f[0] for f in found]).view(x.shape)
        return y if residual is None else y + residual, cache

    class ShortConvolution(nn.Conv1d):
        def __init__(self, hidden_size, kernel_size, bias=False, activation="silu"):
            super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias)
            self.activation = activation

        def forward(self, x, cache=None, output_final_state=False, cu_seqlens=None, **kwargs):
            ops = sys.modules[OPS]
            weight = self.weight.squeeze(1)
            if not torch.is_grad_enabled() and x.shape[1] == 1:
                cache = x.new_zeros(len(x), *self.weight.shape[::2]) if cache is None else cache
                return ops.causal_conv1d_update(x=x, cache=cache, weight=weight, bias=self.bias,
                                                activation=self.activation)  # fmt: skip
            return ops.causal_conv1d(
                x=x,
                weight=weight,
                bias=self.bias,
                initial_state=cache,
                output_final_state=output_final_state,
                activation=self.activation,
                cu_seqlens=cu_seqlens,
                **kwargs,
            )


def stand_in():
    names = ["fla", "fla.modules", "fla.modules.causal_conv1d", OPS]
    made = {name: types.ModuleType(name) for name in names}
    for holder in (made[OPS], made["fla.modules.causal_conv1d"]):
        for name in ("causal_conv1d", "causal_conv1d_update", "ShortConvolution"):
            setattr(holder, name, vars(StandIn)[name])
    made["fla.modules"].ShortConvolution = StandIn.ShortConvolution
    return made


@pytest.fixture(params=["stand-in", pytest.param("fla", marks=pytest.mark.gpu)])
def ops(request, monkeypatch):
    """The module that holds fla's functions."""
    if request.param == "fla":
        return pytest.importorskip(OPS)
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in stand_in().items():
        monkeypatch.setitem(sys.modules, name, module)
    return importlib.import_module(OPS)


def equal(a, b, dtype=torch.float32):
    assert a.shape == b.shape and a.dtype == b.dtype
    assert (a - b).abs().max() <= TOLERANCE[dtype] * (1 + b.abs().max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [False, True])
def test_short_convolution(ops, kernel, device, dtype, bias):
    """Prefill, packed prefill, continued prefill and decode, against fla itself."""
    torch.manual_seed(1)
    module = ops.ShortConvolution(48, 4, bias=bias).to(device, dtype)
    x = torch.randn(2, 11, 48, device=device).to(dtype)
    cu = torch.tensor([0, 4, 4, 11], device=device)

    @torch.no_grad()
    def run():
        y, state = module(x, output_final_state=True)
        more, state = module(x[:, :3], cache=state, output_final_state=True)
        step, state = module(x[:, :1], cache=state, output_final_state=True)
        packed, states = module(x[:1], cu_seqlens=cu, output_final_state=True)
        return y, more, step, state.clone(), packed, states

    expected = run()
    with adapter.patch(kernel, strict=True) as handle:
        got = run()
        prefill, update = handle.report().layers
    for a, b in zip(got, expected, strict=True):
        equal(a, b, dtype)
    assert prefill.calls == {"kernel: prefill": 1, "kernel: continued prefill": 1,
                             "kernel: packed prefill": 1}  # fmt: skip
    assert update.calls == {"kernel: update": 1}
    assert handle.report().bound_layers == 0  # undone by now


def test_functions_with_heads_and_residual(ops, kernel, device):
    x = torch.randn(2, 9, 3, 16, device=device)
    residual, weight = torch.randn_like(x), torch.randn(48, 3, device=device)
    cache = torch.randn(2, 48, 3, device=device)
    if ops.__dict__["causal_conv1d"] is StandIn.causal_conv1d:
        expected = ops.causal_conv1d(x, weight, residual=residual, activation="swish")
        theirs = cache.clone()
        step = ops.causal_conv1d_update(x[:, :1], theirs, weight=weight)
        with adapter.patch(kernel, strict=True):
            equal(ops.causal_conv1d(x, weight, residual=residual, activation="swish")[0],
                  expected[0])  # fmt: skip
            y, state = ops.causal_conv1d_update(x[:, :1], cache, weight=weight)
        equal(y, step[0])
        assert state is cache and torch.equal(cache, theirs)


def test_gradients(ops, kernel, device):
    module = ops.ShortConvolution(48, 4).to(device)
    x = torch.randn(2, 9, 48, device=device, requires_grad=True)
    weights = torch.randn(2, 9, 48, device=device)

    def run():
        module.zero_grad()
        (module(x)[0] * weights).sum().backward()
        dx, x.grad = x.grad, None
        return dx, module.weight.grad.clone()

    expected = run()
    with adapter.patch(kernel) as handle:
        got = run()
        (route,) = handle.report().layers[0].calls
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() <= 2e-5 * b.abs().max()
    x1 = torch.zeros(1, 1, 1, requires_grad=True)
    trains = kernel.why_not("causal_conv1d", x1, torch.zeros(1, 4)) is None
    assert route == "kernel: prefill" if trains else route.startswith("declined: ")


def test_declines_and_strict(ops, kernel, device):
    x = torch.randn(1, 5, 8, device=device)
    wide = torch.randn(8, 9, device=device)
    real = ops.causal_conv1d
    if real is not StandIn.causal_conv1d:
        pytest.skip("what fla does with these calls is its own")
    with adapter.patch(kernel) as handle:
        ops.causal_conv1d(x, wide)
        ops.causal_conv1d(x, wide[:, :4], cp_context=object())
        ops.causal_conv1d(x, wide[:, :4], mystery=1)
        taken = list(handle.report().layers[0].calls)
    assert taken[0].startswith("declined: weight must have shape [D, W]")
    assert taken[1:] == ["declined: context parallelism is fla's own",
                         "declined: unknown keywords ['mystery']"]  # fmt: skip
    with (
        adapter.patch(kernel, strict=True),
        pytest.raises(RuntimeError, match="strict: fla.causal"),
    ):
        ops.causal_conv1d(x, wide)
    assert ops.causal_conv1d is real


def test_undo_is_exact_and_leaves_what_others_put(ops, kernel):
    import fla.modules.causal_conv1d as package

    before = dict(vars(ops)), dict(vars(package))
    handle = adapter.patch(kernel)
    assert package.causal_conv1d is ops.causal_conv1d is not before[0]["causal_conv1d"]
    assert handle.report().bound_layers == 2
    with pytest.raises(ZeroDivisionError), handle:
        raise ZeroDivisionError
    assert (dict(vars(ops)), dict(vars(package))) == before
    handle.unpatch()  # idempotent
    again, theirs = adapter.patch(kernel), object()
    package.causal_conv1d = theirs
    again.unpatch()
    assert package.causal_conv1d is theirs and ops.causal_conv1d is before[0]["causal_conv1d"]
    package.causal_conv1d = before[1]["causal_conv1d"]
