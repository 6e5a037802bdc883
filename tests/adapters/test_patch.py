"""What patch touches and leaves, what it declines and refuses, and what its report proves."""

from __future__ import annotations

import copy
import logging
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers.models.qwen3_5")
sys.path.insert(0, str(Path(__file__).parent))
from models import CONFIGS, conv_states, packed, prompt, tiny  # noqa: E402
from short_conv_transformers import patch, report, unpatch  # noqa: E402
from short_conv_transformers.families import FAMILIES  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_grad")
# fp32 models of this size: what reordered sums of 64 to 100 terms leave of logits around 4.
BOUND = 1e-4


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def qwen(device):
    return tiny("qwen3_5", device)


def close(a, b):
    assert (a - b).abs().max() <= BOUND, (a - b).abs().max()


def snapshot(model):
    return {name: dict(vars(m)) for name, m in model.named_modules()}


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


@pytest.mark.parametrize("family", ["lfm2", "inkling"])
def test_a_declined_block_refuses_packed_rows(family, kernel, device):
    """Its own forward would mix them."""
    model = tiny(family, device)
    cu, seq_idx, _ = packed([5, 3], device)
    block = next(m for m in model.modules() if hasattr(m, "conv_kernel_size"))
    conv = block.conv if family == "lfm2" else block.conv1d
    conv.register_forward_hook(lambda *a: None)
    ids = prompt(1, 8, device)
    with patch(model, kernel):
        model(ids, use_cache=False)
        for packing in ({"cu_seq_lens_q": cu}, {"seq_idx": seq_idx}):
            with pytest.raises(ValueError, match="packed rows must not .* has forward hooks"):
                model(ids, use_cache=False, **packing)


def test_displaced_forward_is_reported_and_left(qwen, kernel):
    patch(qwen, kernel)
    block = next(m for m in qwen.modules() if hasattr(m, "conv1d"))
    theirs = block.forward = lambda *a, **kw: None
    assert "displaced" in report(qwen).layers[0].bound
    unpatch(qwen)
    assert block.forward is theirs


@pytest.mark.parametrize("W", [1, 2, 5, 7, 8])
def test_every_width_with_a_bias(kernel, device, W):
    model, ids = tiny("lfm2", device, conv_L_cache=W, conv_bias=True), prompt(2, 9, device)
    expected = model(ids).logits
    tokens = model.generate(ids, max_new_tokens=8, do_sample=False)
    with patch(model, kernel, strict=True) as handle:
        close(model(ids).logits, expected)
        assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), tokens)
        assert handle.report().proven


def test_a_wider_convolution_declines(kernel, device):
    model, ids = tiny("lfm2", device, conv_L_cache=9), prompt(2, 12, device)
    expected = model(ids).logits
    handle = patch(model, kernel)
    assert torch.equal(model(ids).logits, expected)
    assert "width 1 to 8" in handle.report().layers[0].bound


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "lfm2", "inkling", "mamba2"])
def test_autocast(family, kernel, device):
    """fp32 weights under autocast: bf16 activations meet fp32 taps."""
    model, ids = tiny(family, device), prompt(4, 16, device)
    exact = model(ids).logits
    with torch.autocast(device.type, torch.bfloat16):
        theirs = (model(ids).logits.float() - exact).abs().mean()
        with patch(model, kernel, strict=True) as handle:
            ours = (model(ids).logits.float() - exact).abs().mean()
            model.generate(ids[:1, :5], max_new_tokens=3, do_sample=False)
            assert handle.report().proven
    assert 0 < ours <= 1.2 * theirs


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


def test_the_table_knows_every_file_with_the_two_functions():
    """A new family in transformers fails here, and the error says which."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    functions = re.compile(r"^def causal_conv1d_(fn|update)\(", re.MULTILINE)
    found = {
        file.parent.name
        for file in models.glob("*/modeling_*.py")
        if len(set(functions.findall(file.read_text()))) == 2
    }
    assert found == {family.name for family in FAMILIES}
    assert found == set(CONFIGS)


def test_unknown_model_is_refused(kernel):
    with pytest.raises(ValueError, match=r"known family \(bailing_hybrid, .*got Linear"):
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


@pytest.fixture
def told():
    """What the adapter's log says."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("short_conv_transformers")
    level, _ = logger.level, logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_the_log_has_each_route_once(qwen, kernel, device, told):
    with patch(qwen, kernel):
        for _ in range(2):
            qwen.generate(prompt(1, 4, device), max_new_tokens=4, do_sample=False)
    assert told == [
        f"3/3 short-conv layers run {kernel.__name__}",
        "Qwen3_5GatedDeltaNet: kernel: prefill",
        "Qwen3_5GatedDeltaNet: kernel: update",
    ]


def test_the_proof_turns_red_without_the_kernel(qwen, kernel, device, monkeypatch):
    ids = prompt(1, 6, device)
    expected = qwen(ids).logits
    handle = patch(qwen, kernel)
    assert not handle.report().proven  # nothing ran yet
    qwen(ids)
    assert handle.report().proven
    monkeypatch.setattr(kernel, "why_not", lambda *a, **kw: "it is away")
    assert torch.equal(qwen(ids).logits, expected)
    assert not handle.report().proven
    assert handle.report().calls == {"kernel: prefill": 3, "declined: it is away": 3}
    assert "declined: it is away: 3 calls" in str(handle.report())
    handle.unpatch()
    patch(qwen, kernel, strict=True)
    with pytest.raises(RuntimeError, match="strict: .* declined: it is away"):
        qwen(ids)


def test_a_block_that_skips_its_convolution_is_no_proof(kernel, device, monkeypatch):
    """With mamba-ssm a training Mamba runs a fused function and never gets to the convolution."""
    model = tiny("mamba", device).train()
    modeling = sys.modules[type(model).__module__]
    monkeypatch.setattr(modeling, "mamba_inner_fn", lambda x, *a, **kw: x.transpose(1, 2)[..., :64])
    handle = patch(model, kernel)
    model(prompt(1, 6, device), use_cache=False)
    (route,) = handle.report().calls
    assert route == "declined: the block returned before its convolution"
    assert not handle.report().proven
    handle.unpatch()
    with patch(model, kernel, strict=True), pytest.raises(RuntimeError, match="returned before"):
        model(prompt(1, 6, device), use_cache=False)


class Lora(torch.nn.Module):
    """How peft wraps a layer that it adapts."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.extra = torch.nn.Conv1d(base_layer.in_channels, base_layer.in_channels, 1, groups=16)

    def forward(self, x):
        return self.base_layer(x) + self.extra(x)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_adapted_convolutions_decline_and_adapted_projections_run(family, kernel, device):
    model = tiny(family, device)
    name = "conv" if family == "lfm2" else "conv1d"
    found = [m for m in model.modules() if isinstance(getattr(m, name, None), torch.nn.Conv1d)]
    setattr(found[0], name, Lora(getattr(found[0], name)).to(device))
    projection = "in_proj" if family == "lfm2" else "in_proj_qkv"
    wrapped = torch.nn.Sequential(getattr(found[1], projection), torch.nn.Dropout(0.0))
    setattr(found[1], projection, wrapped)
    ids = prompt(1, 6, device)
    expected = model(ids).logits
    handle = patch(model, kernel)
    close(model(ids).logits, expected)
    first, *others = handle.report().layers
    assert first.bound.startswith(f"declined: {name} is wrapped as Lora") and not first.calls
    assert all(layer.calls == {"kernel: prefill": 1} for layer in others)
    handle.unpatch()
    with pytest.raises(ValueError, match="wrapped as Lora"):
        patch(model, kernel, strict=True)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seqlens", "seq_idx"])
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "inkling", "mamba"])
def test_packing_that_is_no_tensor_is_refused(family, kernel, device, name):
    model = tiny(family, device)
    with patch(model, kernel), pytest.raises(TypeError, match=f"{name} must be a tensor, got list"):
        model(prompt(1, 8, device), use_cache=False, **{name: [0, 5, 8]})


def test_unknown_tensors_are_refused_and_known_ones_are_not(kernel, device):
    model, ids = tiny("lfm2", device), prompt(1, 8, device)
    expected = model(ids).logits
    known = {"num_items_in_batch": torch.tensor(8, device=device), "token_type_ids": ids,
             "labels": ids, "shift_labels": ids}  # fmt: skip
    with patch(model, kernel, strict=True):
        close(model(ids, **known).logits, expected)
        with pytest.raises(TypeError, match="document_ids must be a known packing keyword"):
            model(ids, document_ids=ids)


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "lfm2", "mamba2"])
def test_threads_share_a_model(family, kernel, device):
    """Each with a cache of its own, as a server has; the counts add up."""
    model = tiny(family, device)
    prompts = [prompt(1, 9, device, seed=n) for n in range(4)]
    expected = [model.generate(p, max_new_tokens=6, do_sample=False) for p in prompts]

    def work(n: int) -> bool:
        got = model.generate(prompts[n % 4], max_new_tokens=6, do_sample=False)
        return torch.equal(got, expected[n % 4])

    with patch(model, kernel, strict=True) as handle, ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(24)))
        layers = handle.report().layers
    for layer in layers:
        assert layer.calls == {"kernel: prefill": 24, "kernel: update": 24 * 5}


def test_data_parallel_replicas_run_their_own_weights(kernel, device):
    """What nn.DataParallel does to every module of a model; no second device is needed for that."""
    model = tiny("lfm2", device)
    block = next(m for m in model.modules() if type(m).__name__ == "Lfm2ShortConv")
    x = torch.randn(1, 9, 64, device=device)

    def replica():
        copied = block._replicate_for_data_parallel()
        for name, child in block.named_children():
            shallow = child._replicate_for_data_parallel()
            shallow._parameters = {n: None if p is None else 2 * p
                                   for n, p in child._parameters.items()}  # fmt: skip
            copied._modules[name] = shallow
        return copied

    expected = replica()(x)
    before = set(block.__dict__)
    with patch(model, kernel, strict=True) as handle:
        close(replica()(x), expected)
        assert handle.report().calls == {"kernel: prefill": 1}
    assert set(block.__dict__) == before


def test_glm_without_its_vision_part(kernel, device):
    """The text model hands its input_ids down to the blocks; the whole model does not."""
    model, ids = tiny("glm5_next", device).model.language_model, prompt(1, 8, device)
    expected = model(ids).last_hidden_state
    with patch(model, kernel, strict=True):
        close(model(ids).last_hidden_state, expected)


def test_offsets_need_one_row(kernel, device):
    model = tiny("lfm2", device)
    cu = packed([9, 7], device)[0]
    with patch(model, kernel), pytest.raises(ValueError, match="one packed row, got a batch of 2"):
        model(prompt(2, 8, device), cu_seq_lens_q=cu, use_cache=False)


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "mamba2", "lfm2"])
def test_a_packed_row_leaves_its_last_sequence_in_the_cache(family, kernel, device):
    """Block by block: the attention of transformers does not keep packed rows apart in a cache."""
    from transformers import DynamicCache

    model = tiny(family, device)
    x = torch.randn(1, 12, 64, device=device)
    cu, seq_idx, _ = packed([5, 1, 6, 0], device)
    kind = {"qwen3_5": "Qwen3_5GatedDeltaNet", "kimi_linear": "KimiLinearDeltaAttention",
            "mamba2": "Mamba2Mixer", "lfm2": "Lfm2ShortConv"}[family]  # fmt: skip
    block = next(m for m in model.modules() if type(m).__name__ == kind)
    name = "past_key_values" if family == "lfm2" else "cache_params"
    alone, one = DynamicCache(config=model.config), x[:, 6:]
    expected = block(one, **{name: alone})
    with patch(model, kernel, strict=True):
        for packing in ({"cu_seq_lens_q": cu}, {"seq_idx": seq_idx}):
            cache = DynamicCache(config=model.config)
            close(block(x, **{name: cache}, **packing)[:, 6:], expected)
            for ours, theirs in zip(conv_states(cache), conv_states(alone), strict=True):
                close(ours, theirs)
            step = {name: copy.deepcopy(cache)}, {name: copy.deepcopy(alone)}
            close(block(x[:, :1], **step[0]), block(x[:, :1], **step[1]))


def compiled(run, **kw):
    """A compiled function and the graphs that it runs."""
    torch._dynamo.reset()
    graphs = []

    def record(gm, inputs):
        graphs.append(gm.print_readable(print_output=False))
        return gm

    return torch.compile(run, backend=record, **kw), graphs


def test_compiled_model_runs_the_kernel(qwen, kernel, device):
    ids = prompt(1, 8, device)
    expected = qwen(ids, use_cache=False).logits
    patch(qwen, kernel, strict=True)
    run, graphs = compiled(qwen)
    close(run(ids, use_cache=False).logits, expected)
    assert any("short_conv" in graph for graph in graphs)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear", "lfm2", "inkling", "mamba2"])
def test_a_compiled_block_is_one_graph(family, kernel, device, gradients):
    model = tiny(family, device)
    patch(model, kernel, strict=True)
    kind = {row.name: row.block for row in FAMILIES}[family]
    block = next(m for m in model.modules() if type(m).__name__ == kind)
    channels = block.conv1d.in_channels if family == "inkling" else 64
    x = torch.randn(2, 6, channels, device=device)
    run, graphs = compiled(block, fullgraph=True)
    with torch.set_grad_enabled(gradients):
        close(run(x), block(x))
    assert len(graphs) == 1 and "short_conv" in graphs[0]
