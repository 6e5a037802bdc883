"""Training on the kernels: the loss and every gradient of the unpatched model."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5.22")
sys.path.insert(0, str(Path(__file__).parent))
from models import CONFIGS, PACKED, packed, prompt, tiny  # noqa: E402
from short_conv_transformers import patch, report  # noqa: E402
from short_conv_transformers.binding import asked  # noqa: E402

# Relative to a gradient's norm: fp32 sums of some hundred terms in another order, through four
# layers.
BOUND = 2e-4
FEW = ["qwen3_5", "kimi_linear", "lfm2", "inkling", "mamba"]


@pytest.fixture
def kernel(kernel):
    x = torch.zeros(1, 1, 1, requires_grad=True)
    if reason := kernel.why_not("causal_conv1d", x, torch.zeros(1, 4)):
        pytest.skip(f"this build does not train: {reason}")
    return kernel


def gradients(model, run) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = run(model)
    loss.backward()
    return loss.item(), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def same(got, expected):
    assert abs(got[0] - expected[0]) <= 1e-5 * abs(expected[0])
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        error = (got[1][name] - gradient).norm()
        assert error <= BOUND * gradient.norm() + 1e-7, (name, error, gradient.norm())


def loss_of(ids, **kw):
    return lambda model: model(ids, labels=ids, **kw).loss


@pytest.mark.parametrize("family", CONFIGS)
def test_loss_and_every_gradient(family, kernel, device):
    model = tiny(family, device).train()
    ids = prompt(2, 12, device)
    expected = gradients(model, loss_of(ids, use_cache=False))
    with patch(model, kernel, strict=True) as handle:
        same(gradients(model, loss_of(ids, use_cache=False)), expected)
        assert handle.report().proven


@pytest.mark.parametrize("family", CONFIGS)
def test_packed_gradients_are_the_sum_of_the_sequences(family, kernel, device):
    model = tiny(family, device, **PACKED.get(family, {})).train()
    lengths = [5, 2, 7]
    tokens = prompt(1, sum(lengths), device)
    cu, _, positions = packed(lengths, device)
    bounds = list(zip(cu.tolist(), cu[1:].tolist(), strict=False))
    kw = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
    weights = torch.rand(1, sum(lengths), 97, device=device)

    def alone(model):
        parts = [model(tokens[:, a:b], use_cache=False).logits for a, b in bounds]
        return (torch.cat(parts, 1).square() * weights).sum()

    def together(model):
        logits = model(tokens, position_ids=positions, use_cache=False, **kw).logits
        return (logits.square() * weights).sum()

    expected = gradients(model, alone)
    with patch(model, kernel, strict=True) as handle:
        same(gradients(model, together), expected)
        assert handle.report().proven


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_gradient_checkpointing(family, kernel, device, reentrant):
    model = tiny(family, device).train()
    if not model.supports_gradient_checkpointing:
        pytest.skip("the model has none")
    ids = prompt(2, 12, device)
    expected = gradients(model, loss_of(ids, use_cache=False))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    asked.cache_clear()  # a first call inside a checkpointed layer saves no more than a second
    with patch(model, kernel, strict=True) as handle:
        same(gradients(model, loss_of(ids, use_cache=False)), expected)
        # Each forward ran again for its backward, those inside two checkpointed layers twice.
        calls = {layer.kernel_calls for layer in handle.report().layers}
        assert handle.report().proven and min(calls) == 2 and max(calls) <= 3


@pytest.mark.parametrize("family", FEW)
def test_gradients_through_a_cache(family, kernel, device):
    """A loss over a prefill, a continued prefill and a decode step of one cache."""
    model = tiny(family, device).train()
    ids = prompt(2, 9, device)
    name = "cache_params" if family == "mamba" else "past_key_values"

    def run(model):
        logits, cache = [], {}
        for a, b in ((0, 5), (5, 8), (8, 9)):
            out = model(ids[:, a:b], use_cache=True, **cache)
            cache = {name: out[name]}
            logits.append(out.logits)
        return torch.cat(logits, 1).square().mean()

    try:
        expected = gradients(model, run)
    except RuntimeError as refusal:
        assert "inplace" in str(refusal)
        pytest.skip("transformers' own cache is not differentiable for it")
    with patch(model, kernel, strict=True) as handle:
        same(gradients(model, run), expected)
        assert handle.report().proven


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_fifty_steps_follow_the_same_curve(family, kernel, device):
    curves, ids = [], prompt(2, 16, device)
    start = tiny(family, device)
    with torch.no_grad():
        for p in start.parameters():  # larger ones amplify any rounding a thousandfold
            if p.dim() == 2:
                p.mul_(0.1)
    for patched in (False, True):
        model = copy.deepcopy(start).train()
        if patched:
            patch(model, kernel, strict=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        curve = []
        for _ in range(50):
            optimizer.zero_grad()
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(torch.tensor(curve))
    assert report(model).proven
    assert curves[0][-1] < 0.1 * curves[0][0]
    assert ((curves[1] - curves[0]).abs() <= 1e-3 * curves[0]).all()


@pytest.mark.parametrize("family", FEW)
def test_frozen_models_and_frozen_taps(family, kernel, device):
    """Gradients of the embeddings alone, and of everything but the convolution."""
    ids = prompt(2, 10, device)
    for frozen in (lambda name: "embed" not in name, lambda name: "conv" in name):
        model = tiny(family, device).train()
        for name, p in model.named_parameters():
            p.requires_grad_(not frozen(name))
        expected = gradients(model, loss_of(ids, use_cache=False))
        with patch(model, kernel, strict=True):
            same(gradients(model, loss_of(ids, use_cache=False)), expected)


def test_trainer_keywords_do_not_disturb(kernel, device):
    """Trainer hands num_items_in_batch down with the packing of a flattening collator."""
    model = tiny("lfm2", device).train()
    ids = prompt(1, 8, device)
    cu, seq_idx, positions = packed([5, 3], device)
    with patch(model, kernel, strict=True) as handle:
        model(ids, labels=ids, position_ids=positions, cu_seq_lens_q=cu, cu_seq_lens_k=cu,
              max_length_q=5, max_length_k=5, seq_idx=seq_idx, use_cache=False,
              num_items_in_batch=torch.tensor(8, device=device)).loss.backward()  # fmt: skip
        assert handle.report().calls == {"kernel: packed prefill": 3}


def test_packing_is_refused_where_recomputation_would_lose_it(kernel, device):
    model = tiny("mamba", device).train()
    model.gradient_checkpointing_enable()
    cu, _, _ = packed([5, 3], device)
    with patch(model, kernel), pytest.raises(ValueError, match="gradient checkpointing"):
        model(prompt(1, 8, device), cu_seq_lens_q=cu)
