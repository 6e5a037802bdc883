"""The drop-ins for causal-conv1d 1.7 and the hub layers of transformers."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from cases import offsets


def test_signature_and_values(kernel, device):
    assert list(inspect.signature(kernel.causal_conv1d_fn).parameters)[:8] == [
        "x", "weight", "bias", "seq_idx", "initial_states", "return_final_states",
        "final_states_out", "activation",
    ]  # fmt: skip
    x = torch.randn(2, 24, 9, device=device)
    w, b = torch.randn(24, 4, device=device), torch.randn(24, device=device)
    initial = torch.randn(2, 24, 3, device=device)
    out = torch.full((2, 24, 3), float("nan"), device=device)
    y, final = kernel.causal_conv1d_fn(x, w, b, None, initial, True, out, "silu")
    padded = torch.cat([initial, x], -1)
    exact = nn.functional.silu(nn.functional.conv1d(padded, w[:, None], b, groups=24))
    torch.testing.assert_close(y, exact, rtol=1e-5, atol=1e-5)
    assert final is out and torch.equal(final, x[..., -3:])


@pytest.mark.parametrize("last", [False, True])
def test_gradients(kernel, device, last):
    """Of every tensor, against torch's own depthwise convolution; x's layout is its gradient's."""
    x = torch.randn(2, 24, 9, device=device)
    if last:
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    w, b = torch.randn(24, 4, device=device), torch.randn(24, device=device)
    inputs = [t.requires_grad_() for t in (x, w, b, torch.randn(2, 24, 3, device=device))]
    dy, dfinal = torch.randn(2, 24, 9, device=device), torch.randn(2, 24, 3, device=device)
    outputs = kernel.causal_conv1d_fn(*inputs[:3], None, inputs[3], True, activation="silu")
    got = torch.autograd.grad(outputs, inputs, (dy, dfinal))
    padded = torch.cat([inputs[3], x], -1)
    y = nn.functional.silu(nn.functional.conv1d(padded, w[:, None], b, groups=24))
    expected = torch.autograd.grad((y, padded[..., -3:]), inputs, (dy, dfinal))
    for a, e in zip(got, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)
    assert got[0].stride() == x.stride()


def test_serving_buffers_are_refused_in_training(kernel, device):
    x, w = torch.randn(2, 24, 9, device=device), torch.randn(24, 4, device=device)
    out = torch.empty(2, 24, 3, device=device)
    with pytest.raises(NotImplementedError, match="final_state_out must not be given"):
        kernel.causal_conv1d_fn(
            x, w.requires_grad_(), return_final_states=True, final_states_out=out
        )


def test_layouts_are_kept(kernel, device):
    w = torch.randn(24, 4, device=device)
    first = torch.randn(2, 24, 9, device=device)
    last = first.transpose(1, 2).contiguous().transpose(1, 2)
    a, b = kernel.causal_conv1d_fn(first, w), kernel.causal_conv1d_fn(last, w)
    assert torch.equal(a, b)
    assert a.stride() == first.stride() and b.stride() == last.stride()


def test_packed(kernel, device):
    lengths = [3, 1, 5]
    x = torch.randn(1, 24, 9, device=device)
    w = torch.randn(24, 4, device=device)
    ids = torch.tensor([[0] * 3 + [1] + [2] * 5], dtype=torch.int32, device=device)
    y, final = kernel.causal_conv1d_fn(
        x, w, return_final_states=True, cu_seqlens=offsets(lengths, device)
    )
    assert torch.equal(y, kernel.causal_conv1d_fn(x, w, seq_idx=ids)) and final.shape == (3, 24, 3)


def test_activation_in_the_place_of_seq_idx(kernel, device):
    x, w = torch.randn(1, 8, 4, device=device), torch.randn(8, 4, device=device)
    with pytest.raises(TypeError, match="seq_idx must be a tensor.*activation='silu'"):
        kernel.causal_conv1d_fn(x, w, None, "silu")
    with pytest.raises(ValueError, match=r"x must be \[B, D, T\], got \[8, 4\]"):
        kernel.causal_conv1d_fn(x[0], w)


@pytest.mark.parametrize("state_len", [0, 1, 3, 20])
def test_varlen_states(kernel, device, state_len):
    lengths = [3, 0, 1, 30, 7]
    x = torch.randn(sum(lengths), 40, device=device)
    cu = offsets(lengths, device)
    got = kernel.causal_conv1d_varlen_states(x, cu, state_len)
    for n, length in enumerate(lengths):
        rows = x[cu[n] : cu[n + 1]].t()
        expected = nn.functional.pad(rows, (state_len, 0))[:, length:]
        assert torch.equal(got[n], expected)


def test_update_positions(kernel, device):
    assert list(inspect.signature(kernel.causal_conv1d_update).parameters)[:7] == [
        "x", "conv_state", "weight", "bias", "activation", "cache_seqlens", "conv_state_indices",
    ]  # fmt: skip


class Bound(nn.Module):
    pass


@pytest.mark.parametrize("name", ["causal_conv1d_fn", "causal_conv1d_update"])
def test_layer_class_rules(kernel, name):
    """What kernels checks of a hub layer: stateless, no members but the two flags."""
    layer = getattr(kernel.layers, name)
    assert issubclass(layer, nn.Module) and layer.__init__ is nn.Module.__init__
    members = {m for m in vars(layer) if not m.startswith("__")}
    assert members == {"forward", "can_torch_compile", "has_backward"}
    assert layer.has_backward == (name == "causal_conv1d_fn")


def test_layer_signatures_are_transformers(kernel):
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        theirs = inspect.signature(type(getattr(modeling, name)).forward)
        ours = inspect.signature(getattr(kernel.layers, name).forward)
        assert list(ours.parameters) == list(theirs.parameters)
        assert [p.kind for p in ours.parameters.values()] == [
            p.kind for p in theirs.parameters.values()
        ]


def fn(kernel):
    return lambda *a, **kw: kernel.layers.causal_conv1d_fn.forward(Bound(), *a, **kw)


def test_layer_honours_every_packing_keyword(kernel, device):
    x = torch.randn(1, 24, 9, device=device)
    w = torch.randn(24, 4, device=device)
    cu = offsets([4, 5], device)
    ids = torch.tensor([[0] * 4 + [1] * 5], dtype=torch.int32, device=device)
    expected = torch.cat(
        [kernel.causal_conv1d_fn(x[..., :4], w), kernel.causal_conv1d_fn(x[..., 4:], w)], -1
    )
    for packing in (
        {"cu_seqlens": cu}, {"cu_seq_lens_q": cu}, {"seq_idx": ids},
        {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 5, "max_length_k": 5},
        {"cu_seq_lens_q": cu, "seq_idx": ids}, {"seq_idx": ids, "cu_seqlens": None},
    ):  # fmt: skip
        assert torch.equal(fn(kernel)(x, w, **packing), expected), packing
    with pytest.raises(TypeError, match="'segments'"):
        fn(kernel)(x, w, segments=cu)
    with pytest.raises(ValueError, match="must be the same tensor"):
        fn(kernel)(x, w, cu_seqlens=cu, cu_seq_lens_q=cu + 1)


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seq_lens_q", "seq_idx"])
def test_layer_refuses_packing_that_is_no_tensor(kernel, device, name):
    """Ignored, a list of offsets would mix the sequences without a word."""
    x, w = torch.randn(1, 24, 9, device=device), torch.randn(24, 4, device=device)
    with pytest.raises(TypeError, match=f"{name} must be a tensor, got list"):
        fn(kernel)(x, w, **{name: [0, 4, 9]})


def test_layer_ignores_what_the_loss_and_attention_need(kernel, device):
    """A trainer hands its scalar count of tokens down to every layer."""
    x, w = torch.randn(1, 24, 9, device=device), torch.randn(24, 4, device=device)
    others = {"num_items_in_batch": torch.tensor(9), "position_ids": torch.arange(9)[None]}
    assert torch.equal(fn(kernel)(x, w, **others, use_cache=False), kernel.causal_conv1d_fn(x, w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_takes_half_precision_taps_beside_fp32(kernel, device, dtype):
    """A block that computes in fp32 keeps its weights in the model's dtype."""
    x, w = torch.randn(2, 24, 9, device=device), torch.randn(24, 4, device=device).to(dtype)
    b = torch.randn(24, device=device).to(dtype)
    expected = kernel.causal_conv1d_fn(x, w.float(), b.float(), activation="silu")
    assert torch.equal(fn(kernel)(x, w, b, activation="silu"), expected)
    state = torch.zeros(2, 24, 4, device=device)
    update = kernel.layers.causal_conv1d_update.forward
    y = update(Bound(), x[..., :1], state, w, b, "silu")
    assert torch.equal(y, expected[..., :1])


def test_layer_has_gradients(kernel, device):
    x = torch.randn(1, 24, 9, device=device, requires_grad=True)
    w = torch.randn(24, 4, device=device, requires_grad=True)
    cu = offsets([4, 5], device)
    got = torch.autograd.grad(fn(kernel)(x, w, activation="silu", cu_seq_lens_q=cu).sum(), (x, w))
    parts = [kernel.causal_conv1d_fn(p, w, activation="silu") for p in x.split([4, 5], 2)]
    expected = torch.autograd.grad(torch.cat(parts, 2).sum(), (x, w))
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-6, atol=1e-6)


def test_layer_contradiction_is_found_on_request(kernel, device):
    x, w = torch.randn(1, 24, 9, device=device), torch.randn(24, 4, device=device)
    ids = torch.tensor([[0] * 3 + [1] * 6], dtype=torch.int32, device=device)
    with kernel.checking(), pytest.raises(ValueError, match="seq_idx and cu_seqlens disagree"):
        fn(kernel)(x, w, seq_idx=ids, cu_seq_lens_q=offsets([4, 5], device))


@pytest.mark.parametrize("T", [None, 1, 3])
def test_update_layer(kernel, device, T):
    shape = (2, 24) if T is None else (2, 24, T)
    x, w = torch.randn(*shape, device=device), torch.randn(24, 4, device=device)
    a, b = (torch.ones(2, 24, 4, device=device) for _ in range(2))
    y = kernel.layers.causal_conv1d_update.forward(Bound(), x, a, w, activation="silu")
    assert torch.equal(y, kernel.causal_conv1d_update(x, b, w, activation="silu"))
    assert torch.equal(a, b)
