"""Patched models equal unpatched ones, the route is the kernel's, and undo is exact."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers.models.qwen3_5")
sys.path.insert(0, str(Path(__file__).parent))
from models import FAMILIES, conv_states, prompt, tiny  # noqa: E402
from short_conv_transformers import patch, report, unpatch  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_grad")
# fp32 models of this size: what reordered sums of 64 to 100 terms leave of logits around 4.
BOUND = 1e-4


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=FAMILIES)
def model(request, device):
    return tiny(request.param, device)


@pytest.fixture
def qwen(device):
    return tiny("qwen3_5", device)


def close(a, b):
    assert (a - b).abs().max() <= BOUND, (a - b).abs().max()


def generate(model, ids, n=8, **kw):
    return model.generate(ids, max_new_tokens=n, do_sample=False, **kw)


def test_generate_equals_and_every_call_is_counted(model, kernel, device):
    ids = prompt(2, 9, device)
    expected = generate(model, ids)
    handle = patch(model, kernel, strict=True)
    assert torch.equal(generate(model, ids), expected)
    n = report(model).bound_layers
    assert handle.report().calls == {"kernel: prefill": n, "kernel: update": 7 * n}
    assert n == len(report(model).layers)
    assert f"{n}/{n} layers bound" in str(report(model))


SPLITS = [(9,), (2,), (1, 1, 1), (7, 4), (2, 9), (1, 10), (5, 1, 2, 1)]


@pytest.mark.parametrize("lengths", SPLITS)
def test_logits_and_cache_in_any_split(qwen, kernel, device, lengths):
    ids = prompt(2, sum(lengths), device)

    def run():
        cache, logits, t = None, [], 0
        for n in lengths:
            out = qwen(ids[:, t : t + n], past_key_values=cache, use_cache=True)
            cache, t = out.past_key_values, t + n
            logits.append(out.logits)
        return torch.cat(logits, 1), cache

    expected, their_cache = run()
    whole = qwen(ids).logits
    with patch(qwen, kernel, strict=True):
        got, our_cache = run()
    close(got, expected)
    close(got, whole)
    for ours, theirs in zip(conv_states(our_cache), conv_states(their_cache), strict=True):
        assert ours.shape == theirs.shape
        close(ours, theirs)
    # The first block's inputs are the same bits in both runs, so its state must be too.
    assert torch.equal(conv_states(our_cache)[0], conv_states(their_cache)[0])


def test_left_padded_batch(model, kernel, device):
    ids = prompt(2, 10, device)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    ids[0, :4] = 0
    expected = generate(model, ids, attention_mask=mask)
    logits = model(ids, attention_mask=mask).logits
    with patch(model, kernel, strict=True):
        assert torch.equal(generate(model, ids, attention_mask=mask), expected)
        close(model(ids, attention_mask=mask).logits, logits)


def packed(lengths, device):
    cu = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    ids = torch.repeat_interleave(
        torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device)
    )
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    return cu, ids.int()[None], positions[None]


@pytest.mark.parametrize("packing", ["cu_seq_lens", "seq_idx", "both"])
def test_packed_rows_equal_separate_runs(model, kernel, device, packing):
    lengths = [5, 1, 7, 3]
    tokens = prompt(1, sum(lengths), device)
    cu, seq_idx, positions = packed(lengths, device)
    kw = {"position_ids": positions, "use_cache": False}
    if packing != "seq_idx":
        kw |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
    if packing != "cu_seq_lens":
        kw["seq_idx"] = seq_idx
    alone = torch.cat(
        [model(tokens[:, a:b]).logits for a, b in zip(cu.tolist(), cu[1:].tolist(), strict=False)],
        1,
    )
    with pytest.raises(ValueError):  # transformers itself refuses
        model(tokens, **kw)
    with patch(model, kernel, strict=True) as handle:
        got = model(tokens, **kw).logits
        close(got, alone)
        assert handle.report().calls == {"kernel: packed prefill": 3}
        changed = tokens.clone()
        changed[:, :5] = prompt(1, 5, device, seed=9)
        after = model(changed, **kw).logits
    assert torch.equal(after[:, 5:], got[:, 5:])
    assert not torch.equal(after[:, :5], got[:, :5])


def test_contradicting_packing_raises_on_request(qwen, kernel, device):
    tokens = prompt(1, 8, device)
    cu, _, positions = packed([5, 3], device)
    _, seq_idx, _ = packed([4, 4], device)
    with patch(qwen, kernel), kernel.checking(), pytest.raises(ValueError, match="disagree"):
        qwen(tokens, position_ids=positions, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=5,
             max_length_k=5, seq_idx=seq_idx, use_cache=False)  # fmt: skip


class Ops(TorchDispatchMode):
    def __init__(self):
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def conv_section_ops(model, x, cache):
    """What a patched block runs between the input projection and the split."""
    block = next(m for m in model.modules() if hasattr(m, "conv1d"))
    with Ops() as ops:
        block(x, cache_params=cache)
    conv = [i for i, name in enumerate(ops.names) if "short_conv" in name]
    return ops.names, conv


def test_state_is_read_and_written_in_place_without_copies(qwen, kernel, device):
    ids = prompt(2, 6, device)
    patch(qwen, kernel, strict=True)
    cache = qwen(ids, use_cache=True).past_key_values
    pointers = [s.data_ptr() for s in conv_states(cache)]
    x = torch.randn(2, 5, 64, device=device)
    names, (conv,) = conv_section_ops(qwen, x, cache)
    # From the projection to the conv: views and the op, but no cat, pad, copy or new layout.
    around = names[: conv + 4]
    banned = ("cat", "pad", "copy", "clone", "contiguous", "convolution")
    assert not [n for n in around if any(b in n for b in banned)], around
    assert pointers == [s.data_ptr() for s in conv_states(cache)]
    names, (conv,) = conv_section_ops(qwen, x[:, :1], cache)
    assert "update" in names[conv]
    assert not [n for n in names[: conv + 4] if any(b in n for b in banned)]
    assert pointers == [s.data_ptr() for s in conv_states(cache)]


def test_gradients_decline_with_a_reason(qwen, kernel, device):
    ids = prompt(1, 6, device)
    with torch.enable_grad():
        expected = qwen(ids).logits
        handle = patch(qwen, kernel)
        qwen.train()
        got = qwen(ids).logits
    assert torch.equal(got, expected)
    (route,) = handle.report().calls
    assert route.startswith("declined: gradients are enabled")
    unpatch(qwen)
    patch(qwen, kernel, strict=True)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="strict: .* gradients are enabled"):
        qwen(ids)


def test_two_models_of_one_family_are_independent(device, kernel):
    a, b = tiny("qwen3_5", device), tiny("qwen3_5", device, seed=5)
    ids = prompt(1, 6, device)
    before = b(ids).logits
    patch(a, kernel)
    a(ids)
    assert torch.equal(b(ids).logits, before)
    with pytest.raises(ValueError, match="must have been patched"):
        report(b)
    patch(b, kernel)
    b(ids)
    b(ids)
    assert report(a).calls == {"kernel: prefill": 3}
    assert report(b).calls == {"kernel: prefill": 6}


def snapshot(model):
    return {name: dict(vars(m)) for name, m in model.named_modules()}


def test_restore_is_exact(model, kernel, device):
    before = snapshot(model)
    patch(model, kernel)
    patch(model, kernel)  # idempotent
    assert snapshot(model) != before
    unpatch(model)
    assert snapshot(model) == before
    unpatch(model)
    assert snapshot(model) == before


def test_restore_after_an_exception(qwen, kernel, device):
    before = snapshot(qwen)
    with pytest.raises(RuntimeError), patch(qwen, kernel):
        qwen(inputs_embeds=torch.zeros(1, 4, 7, device=device))
    assert snapshot(qwen) == before


def test_nothing_is_touched_when_the_kernel_is_missing(qwen, tmp_path, monkeypatch):
    monkeypatch.setenv("SHORT_CONV_KERNEL", str(tmp_path))
    monkeypatch.setenv("USE_HUB_KERNELS", "NO")
    monkeypatch.setattr("short_conv_transformers.loader.BUILD", tmp_path / "none")
    before = snapshot(qwen)
    with pytest.raises(RuntimeError, match="no short-conv kernel found\n  SHORT_CONV_KERNEL="):
        patch(qwen)
    assert snapshot(qwen) == before


def test_deepcopy_is_patched_on_its_own(qwen, kernel, device):
    patch(qwen, kernel)
    twin = copy.deepcopy(qwen)
    ids = prompt(1, 6, device)
    assert torch.equal(twin(ids).logits, qwen(ids).logits)
    twin(ids)
    assert report(qwen).calls == {"kernel: prefill": 3}
    assert report(twin).calls == {"kernel: prefill": 6}
    unpatch(twin)
    assert report(qwen).bound_layers == 3


def test_save_and_reload(qwen, kernel, device, tmp_path):
    patch(qwen, kernel)
    qwen.save_pretrained(tmp_path)
    again = type(qwen).from_pretrained(tmp_path).to(device).eval()
    ids = prompt(1, 6, device)
    expected = qwen(ids).logits
    close(again(ids).logits, expected)
    close(patch(again, kernel, strict=True).model(ids).logits, expected)


def test_wrapped_hooked_and_foreign_blocks_decline(qwen, kernel, device):
    blocks = [m for m in qwen.modules() if hasattr(m, "conv1d")]
    blocks[0].conv1d = torch.nn.Sequential(blocks[0].conv1d)
    blocks[1].forward = lambda *a, **kw: None
    handle = patch(qwen, kernel)
    bound = [layer.bound for layer in handle.report().layers]
    assert bound[0].startswith("declined: conv1d is wrapped as Sequential")
    assert bound[1].startswith("declined: forward was already replaced by")
    assert bound[2] == kernel.__name__
    unpatch(qwen)
    with pytest.raises(ValueError, match="strict: cannot bind\n"):
        patch(qwen, kernel, strict=True)
    assert not any("_short_conv" in vars(m) for m in qwen.modules())


def test_hooks_on_the_convolution_decline_at_the_call(qwen, kernel, device):
    patch(qwen, kernel)
    block = next(m for m in qwen.modules() if hasattr(m, "conv1d"))
    remove = block.conv1d.register_forward_hook(lambda *a: None)
    qwen(prompt(1, 4, device))
    routes = report(qwen).layers[0].calls
    assert list(routes) == [
        "declined: conv1d has forward hooks, which reading its weight would skip"
    ]
    remove.remove()


def test_displaced_forward_is_reported_and_left(qwen, kernel):
    patch(qwen, kernel)
    block = next(m for m in qwen.modules() if hasattr(m, "conv1d"))
    theirs = block.forward = lambda *a, **kw: None
    assert "displaced" in report(qwen).layers[0].bound
    unpatch(qwen)
    assert block.forward is theirs


def test_parametrized_weight_is_honoured(qwen, kernel, device):
    from torch.nn.utils import parametrize

    class Double(torch.nn.Module):
        def forward(self, w):
            return 2 * w

    for block in [m for m in qwen.modules() if hasattr(m, "conv1d")]:
        parametrize.register_parametrization(block.conv1d, "weight", Double())
    ids = prompt(1, 7, device)
    expected = qwen(ids).logits
    with patch(qwen, kernel, strict=True):
        close(qwen(ids).logits, expected)


def test_unknown_model_is_refused(kernel):
    with pytest.raises(ValueError, match=r"known family \(qwen3_5, .*got Linear"):
        patch(torch.nn.Linear(2, 2), kernel)


def test_accelerate_hooks_are_kept(qwen, kernel, device):
    accelerate = pytest.importorskip("accelerate")
    block = next(m for m in qwen.modules() if hasattr(m, "conv1d"))
    seen = []

    class Watch(accelerate.hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(type(module).__name__)
            return args, kwargs

    accelerate.hooks.add_hook_to_module(block, Watch())
    accelerate.hooks.add_hook_to_module(block.conv1d, Watch())
    ids = prompt(1, 6, device)
    expected = qwen(ids).logits
    handle = patch(qwen, kernel, strict=True)
    seen.clear()
    close(qwen(ids).logits, expected)
    assert seen == ["Qwen3_5GatedDeltaNet", "Conv1d"]
    assert handle.report().calls == {"kernel: prefill": 3}
    unpatch(qwen)
    seen.clear()
    assert torch.equal(qwen(ids).logits, expected) and seen == ["Qwen3_5GatedDeltaNet", "Conv1d"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_models(device, kernel, dtype):
    """As far from the fp32 model as the unpatched one, over enough tokens to average rounding:
    the fused SiLU rounds once where transformers rounds twice."""
    ours = theirs = 0.0
    for seed in range(3):
        model = tiny("qwen3_5", device, dtype, seed)
        ids = prompt(8, 24, device, seed)
        exact = tiny("qwen3_5", device, seed=seed)(ids).logits
        theirs += (model(ids).logits.float() - exact).abs().mean()
        with patch(model, kernel, strict=True) as handle:
            ours += (model(ids).logits.float() - exact).abs().mean()
            model.generate(ids, max_new_tokens=4, do_sample=False)
            assert handle.report().calls == {"kernel: prefill": 6, "kernel: update": 9}
    assert ours <= 1.1 * theirs


def test_reset_and_reused_cache(qwen, kernel, device):
    from transformers import DynamicCache

    patch(qwen, kernel, strict=True)
    cache = DynamicCache(config=qwen.config)
    ids = prompt(1, 6, device)
    first = qwen(ids, past_key_values=cache).logits
    cache.reset()
    fresh = qwen(ids, past_key_values=DynamicCache(config=qwen.config)).logits
    again = qwen(ids, past_key_values=cache).logits
    assert torch.equal(fresh, first) and again.shape == first.shape


def test_beam_search_reorders_states(qwen, kernel, device):
    ids = prompt(2, 6, device)
    expected = generate(qwen, ids, num_beams=3)
    with patch(qwen, kernel, strict=True):
        assert torch.equal(generate(qwen, ids, num_beams=3), expected)


def test_compiled_model_runs_the_kernel(qwen, kernel, device):
    ids = prompt(1, 8, device)
    expected = qwen(ids, use_cache=False).logits
    patch(qwen, kernel, strict=True)
    torch._dynamo.reset()
    graphs = []

    def record(gm, inputs):
        graphs.append(str(gm.graph))
        return gm

    run = torch.compile(qwen, backend=record)
    close(run(ids, use_cache=False).logits, expected)
    assert any("short_conv" in graph for graph in graphs)
    torch._dynamo.reset()
