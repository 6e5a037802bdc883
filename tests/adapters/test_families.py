"""Every row of the table on a tiny model: equal to the unpatched one where that is right, to
separate sequences where it is not, and on the kernel at every call."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.22")
sys.path.insert(0, str(Path(__file__).parent))
from models import CONFIGS, conv_states, packed, prompt, shared, step, tiny  # noqa: E402
from short_conv_transformers import patch, report  # noqa: E402
from short_conv_transformers.apply import why_not  # noqa: E402
from short_conv_transformers.families import FAMILIES  # noqa: E402

BY_NAME = {family.name: family for family in FAMILIES}
# fp32 models of this size: what reordered sums of 64 to 100 terms leave of logits around 4.
BOUND = 1e-4
pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.parametrize("family", CONFIGS),
]


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def model(family, device):
    return shared(family, device)


def close(a, b):
    assert a.shape == b.shape
    assert (a - b).abs().max() <= BOUND, (a - b).abs().max()


def generate(model, ids, n=8, **kw):
    return model.generate(ids, max_new_tokens=n, do_sample=False, **kw)


def blocks(model, family):
    return [m for m in model.modules() if type(m).__name__ == BY_NAME[family].block]


def test_row_fits_the_installed_class(family, model):
    row = BY_NAME[family]
    block = getattr(importlib.import_module(row.modeling), row.block)
    found = blocks(model, family)
    assert found and all(type(m) is block and why_not(m, row) is None for m in found)
    code = inspect.unwrap(block.forward).__code__
    assert set(row.rules) <= set(code.co_names)
    assert row.joined == ({"cat", "q_proj"} <= set(code.co_names))
    source = inspect.getsource(importlib.import_module(row.modeling))
    hooks = re.findall(r"@force_accelerate_hooks\((.*?)\)", source)
    assert str([row.conv, *row.hooked]).replace("'", '"') in hooks or f'"{row.conv}"' in hooks
    assert bool(row.hooked) == any("[" in hook for hook in hooks)
    for carrier in row.carriers:
        assert carrier in vars(sys.modules[row.modeling])


def test_generate(family, model, kernel, device):
    ids = prompt(2, 9, device)
    expected = generate(model, ids)
    n = len(blocks(model, family))
    with patch(model, kernel, strict=True) as handle:
        assert torch.equal(generate(model, ids), expected)
        assert handle.report().calls == {"kernel: prefill": n, "kernel: update": 7 * n}
        assert handle.report().proven
        assert f"{n}/{n} layers bound" in str(report(model))


@pytest.mark.parametrize("lengths", [(2,), (1, 1, 1), (7, 4), (2, 9), (1, 10), (5, 1, 2, 1)])
def test_any_split(family, model, kernel, device, lengths):
    ids = prompt(2, sum(lengths), device)

    def run():
        cache, logits, t = None, [], 0
        for n in lengths:
            part, cache = step(model, ids[:, t : t + n], cache)
            logits.append(part)
            t += n
        return torch.cat(logits, 1), conv_states(cache)

    expected, theirs = run()
    with patch(model, kernel, strict=True):
        got, ours = run()
    close(got, expected)
    for a, b in zip(ours, theirs, strict=True):
        close(a, b)
    # The first block's inputs are the same bits in both runs, so its state must be too.
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch", [1, 2])
def test_padding(family, model, kernel, device, side, batch):
    ids = prompt(batch, 10, device)
    mask = torch.ones_like(ids)
    hole = slice(0, 4) if side == "left" else slice(6, 10)
    mask[0, hole], ids[0, hole] = 0, 0

    def run():
        logits, cache = step(model, ids, attention_mask=mask)
        # Models without attention take no mask over what lies in front.
        more = torch.cat([mask, mask.new_ones(batch, 3)], 1)
        more = {} if hasattr(model, "backbone") else {"attention_mask": more}
        after, cache = step(model, ids[:, 4:7], cache, **more)
        return logits[mask.bool()], after, conv_states(cache)

    expected = run()
    with patch(model, kernel, strict=True):
        got = run()
    close(got[0], expected[0])
    close(got[1], expected[1])
    for a, b in zip(got[2], expected[2], strict=True):
        close(a, b)


@pytest.mark.parametrize("packing", ["cu_seq_lens", "seq_idx", "both"])
def test_packed_rows_equal_separate_runs(family, kernel, device, packing):
    model = shared(family, device, packed=True)
    lengths = [5, 1, 7, 3]
    tokens = prompt(1, sum(lengths), device)
    cu, seq_idx, positions = packed(lengths, device)
    kw = {"position_ids": positions, "use_cache": False}
    if packing != "seq_idx":
        kw |= {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
    if packing != "cu_seq_lens":
        kw["seq_idx"] = seq_idx
    bounds = list(zip(cu.tolist(), cu[1:].tolist(), strict=False))
    alone = torch.cat([model(tokens[:, a:b], use_cache=False).logits for a, b in bounds], 1)
    with patch(model, kernel, strict=True) as handle:
        close(model(tokens, **kw).logits, alone)
        assert handle.report().calls == {"kernel: packed prefill": len(blocks(model, family))}
    # Without the kernels transformers refuses, or mixes the sequences without a word.
    try:
        mixed = model(tokens, **kw).logits
    except ValueError as refusal:
        assert "packed" in str(refusal)
    else:
        assert (mixed - alone).abs().max() > 0.1


def test_packed_sequences_share_no_bit(family, model, kernel, device):
    lengths = [5, 1, 7, 3]
    cu, seq_idx, _ = packed(lengths, device)
    x = torch.randn(1, sum(lengths), 64, device=device)
    with patch(model, kernel, strict=True):
        block = blocks(model, family)[0]
        if family == "inkling":
            block = next(m for m in blocks(model, family) if m.conv1d.in_channels == 64)
        for packing in ({"cu_seq_lens_q": cu}, {"seq_idx": seq_idx}):
            block.__dict__["_short_conv"].running.carried = packing
            before = block(x)
            for a, b in zip(cu.tolist(), cu[1:].tolist(), strict=False):
                changed = x.clone()
                changed[:, a:b] = torch.randn(1, b - a, 64, device=device)
                same = (block(changed) == before).all(-1)[0]
                assert same.sum() == sum(lengths) - (b - a) and not same[a:b].any()


def test_packed_rows_of_neither_kind_are_transformers_own(family, kernel, device):
    """Position ids alone do not reach the blocks: as wrong as without the kernels, no worse."""
    model = shared(family, device, packed=True)
    tokens = prompt(1, 8, device)
    kw = {"position_ids": packed([5, 3], device)[2], "use_cache": False}
    expected = model(tokens, **kw).logits
    with patch(model, kernel, strict=True):
        close(model(tokens, **kw).logits, expected)


def test_contradicting_packing_raises_on_request(family, kernel, device):
    model = shared(family, device, packed=True)
    cu, _, positions = packed([5, 3], device)
    _, seq_idx, _ = packed([4, 4], device)
    with patch(model, kernel), kernel.checking(), pytest.raises(ValueError, match="disagree"):
        model(prompt(1, 8, device), position_ids=positions, cu_seq_lens_q=cu, cu_seq_lens_k=cu,
              max_length_q=5, max_length_k=5, seq_idx=seq_idx, use_cache=False)  # fmt: skip


def test_static_cache(family, model, kernel, device):
    if not model._can_compile_fullgraph:
        pytest.skip("transformers has no static cache for it")
    ids = prompt(2, 9, device)
    text = model.config.get_text_config()

    def run():
        cache = transformers.StaticCache(config=text, max_cache_len=24)
        logits = [step(model, ids, cache)[0]]
        logits += [step(model, ids[:, :n], cache)[0] for n in (1, 3, 1)]
        return torch.cat(logits, 1), [s.data_ptr() for s in conv_states(cache)], cache

    expected, _, _ = run()
    with patch(model, kernel, strict=True):
        got, pointers, cache = run()
        close(got, expected)
        cache.reset()
        again = step(model, ids, cache)[0]
        assert torch.equal(again, got[:, :9])
        assert pointers == [s.data_ptr() for s in conv_states(cache)]


def test_reset_and_reused_cache(family, model, kernel, device):
    ids = prompt(1, 6, device)
    with patch(model, kernel, strict=True):
        first, cache = step(model, ids)
        step(model, ids[:, :1], cache)
        cache.reset()
        for layer in cache.layers:  # transformers keeps the zeroed keys of a dynamic layer
            if getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = layer.keys[..., :0, :], layer.values[..., :0, :]
        if family in ("glm5_next", "qwen4_exp"):
            return  # their indexer caches have no reset to empty
        again, _ = step(model, ids, cache, position_ids=torch.arange(6, device=device)[None])
        assert torch.equal(again, first)


def test_beam_search_reorders_states(family, model, kernel, device):
    ids = prompt(2, 6, device)
    expected = generate(model, ids, num_beams=3)
    with patch(model, kernel, strict=True):
        assert torch.equal(generate(model, ids, num_beams=3), expected)


def test_assisted_decoding(family, model, kernel, device):
    """Prompt lookup drafts several tokens a step, so rejected ones must leave the conv state."""
    ids = prompt(1, 6, device).repeat(1, 3)
    expected = generate(model, ids, 12)
    try:
        assert torch.equal(generate(model, ids, 12, prompt_lookup_num_tokens=3), expected)
    except ValueError as refusal:
        assert "stateful" in str(refusal)
        with patch(model, kernel, strict=True), pytest.raises(ValueError, match="stateful"):
            generate(model, ids, 12, prompt_lookup_num_tokens=3)
        return
    with patch(model, kernel, strict=True) as handle:
        got = generate(model, ids, 12, prompt_lookup_num_tokens=3)
        assert torch.equal(got, expected)
        assert "kernel: prefill with recorded past" in handle.report().calls


def test_a_cache_that_records_its_past(family, model, kernel, device):
    """What assisted decoding asks of a cache, also of families that transformers refuses it to."""
    x = torch.randn(2, 8, 64, device=device)
    block = blocks(model, family)[0]
    if family == "inkling":
        block = next(m for m in blocks(model, family) if m.conv1d.in_channels == 64)

    def run():
        cache = transformers.DynamicCache(config=model.config.get_text_config())
        cache.activate_past_recording()
        parts = [block(x[:, a:b], **{BY_NAME[family].cache: cache}) for a, b in ((0, 5), (5, 8))]
        return torch.cat(parts, 1), conv_states(cache)

    expected, theirs = run()
    with patch(model, kernel, strict=True):
        got, ours = run()
        assert report(model).calls == {"kernel: prefill with recorded past": 2}
    close(got, expected)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(family, kernel, device, dtype):
    """A block is as far from its fp32 twin as without the kernels: the fused SiLU rounds once
    where transformers rounds twice."""
    model = tiny(family, device, dtype)
    block = blocks(model, family)[0]
    exact = copy.deepcopy(block).float()
    width = exact.conv1d.in_channels if family == "inkling" else 64
    x = torch.randn(8, 64, width, device=device, dtype=dtype)
    reference = exact(x.float())
    theirs = (block(x).float() - reference).abs().mean()
    with patch(model, kernel, strict=True) as handle:
        ours = (block(x).float() - reference).abs().mean()
        generate(model, prompt(2, 5, device), 4)
        n = len(blocks(model, family))
        assert handle.report().calls == {"kernel: prefill": n + 1, "kernel: update": 3 * n}
        assert handle.report().proven
    assert 0 < ours <= 1.02 * theirs


def test_fp32_taps_in_a_half_precision_model(family, kernel, device):
    model = tiny(family, device, torch.bfloat16)
    for block in blocks(model, family):
        getattr(block, BY_NAME[family].conv).float()
    ids = prompt(2, 9, device)
    expected = model(ids).logits
    with patch(model, kernel, strict=True) as handle:
        got = model(ids).logits
        assert handle.report().proven
    assert (got - expected).abs().mean() <= 0.02 * expected.abs().mean()


def test_deepcopy_is_patched_on_its_own(family, model, kernel, device):
    ids = prompt(1, 6, device)
    n = len(blocks(model, family))
    with patch(model, kernel, strict=True):
        twin = copy.deepcopy(model)
        assert torch.equal(twin(ids).logits, model(ids).logits)
        twin(ids)
        assert report(model).calls == {"kernel: prefill": n}
        assert report(twin).calls == {"kernel: prefill": 2 * n}


def test_save_and_reload(family, model, kernel, device, tmp_path):
    ids = prompt(1, 6, device)
    expected = model(ids).logits
    with patch(model, kernel):
        model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).to(device).eval()
    close(again(ids).logits, expected)
    close(patch(again, kernel, strict=True).model(ids).logits, expected)


def test_train_and_eval_switches(family, model, kernel, device):
    ids = prompt(1, 6, device)
    expected = model(ids).logits
    with patch(model, kernel, strict=True) as handle:
        model.train()
        try:
            model(ids, use_cache=False)
        finally:
            model.eval()
        close(model(ids).logits, expected)
        assert handle.report().proven


def test_offloaded_weights_reach_the_kernel(family, kernel, device):
    """accelerate keeps every weight elsewhere until its module is called, and a convolution's
    weight is read without a call."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny(family, device)
    ids = prompt(1, 6, device)
    accelerate.cpu_offload(model, execution_device=device)
    conv = getattr(blocks(model, family)[0], BY_NAME[family].conv)
    assert conv.weight.device.type == "meta"
    expected = model(ids).logits
    with patch(model, kernel, strict=True) as handle:
        close(model(ids).logits, expected)
        assert handle.report().proven
    assert conv.weight.device.type == "meta"
    close(model(ids).logits, expected)


def test_restore_is_exact(family, model, kernel):
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    with patch(model, kernel) as handle:
        patch(model, kernel)  # idempotent
        assert {name: dict(vars(m)) for name, m in model.named_modules()} != before
        assert inspect.signature(model.forward) == inspect.signature(type(model).forward.__get__(0))
    handle.unpatch()
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before
