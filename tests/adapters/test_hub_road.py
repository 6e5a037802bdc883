"""The official road: our layers bound by kernels' own kernelize, transformers unchanged.

In processes of their own: the road switches every model of a family in the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers.models.qwen3_5")

START = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import kernels, torch
from kernels import Mode, use_kernel_mapping
from models import prompt, tiny
from short_conv_transformers import load_kernel, mapping, report

path, device = Path(sys.argv[1]), sys.argv[3]
kernel, calls = load_kernel(path), []
for name in ("causal_conv1d", "causal_conv1d_update"):
    real = getattr(kernel.ops, name)
    def counted(*a, real=real, name=name, **kw):
        calls.append(name)
        return real(*a, **kw)
    setattr(kernel.ops, name, counted)

def generate(model, ids):
    return model.generate(ids, max_new_tokens=8, do_sample=False)

def kernelize(model, mapping, mode=Mode.INFERENCE):
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(model, device=device, mode=mode)
"""

FUNCTIONS = """
from models import CONFIGS

def check(family):
    model, ids = tiny(family, device), prompt(2, 9, device)
    twin = tiny(family, device)
    n = sum("causal_conv1d_fn" in getattr(m, "_kernel_funcs", ()) for m in model.modules())
    assert n > 0
    calls.clear()
    with torch.no_grad():
        logits, tokens = model(ids).logits, generate(model, ids)
        kernelize(model, mapping(path, device, blocks=False))
        assert (model(ids).logits - logits).abs().max() <= 1e-4
        assert calls == ["causal_conv1d"] * n, calls
        assert torch.equal(generate(model, ids), tokens)
        assert calls.count("causal_conv1d") == 2 * n and len(calls) == 9 * n, calls
        calls.clear()
        twin(ids)
        assert len(calls) == n  # the function object is the family's, not the model's
        kernelize(model, {})
        calls.clear()
        assert torch.equal(model(ids).logits, logits) and not calls
    expected = model.train()(ids, labels=ids, use_cache=False).loss
    kernelize(model, mapping(path, device, blocks=False), Mode.TRAINING)
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    assert abs(loss - expected) <= 1e-5 * expected and calls == ["causal_conv1d"] * n, calls
    kernelize(model, {})

for family in CONFIGS:
    try:
        check(family)
    except Exception as error:
        raise AssertionError(family) from error
"""

BLOCKS = """
family = sys.argv[4]
model, ids = tiny(family, device), prompt(2, 9, device)
with torch.no_grad():
    logits, tokens = model(ids).logits, generate(model, ids)
    kernelize(model, mapping(path, device))
    assert torch.equal(generate(model, ids), tokens)
    assert (model(ids).logits - logits).abs().max() <= 1e-4
    assert report(model).calls == {"kernel: prefill": 6, "kernel: update": 21}
    assert report(model).proven
    cu = torch.tensor([0, 5, 9], device=device)
    packed = model(ids[:1], position_ids=torch.tensor([[*range(5), *range(4)]], device=device),
                   cu_seq_lens_q=cu, use_cache=False).logits
    assert (packed[:, 5:] - model(ids[:1, 5:], use_cache=False).logits).abs().max() <= 1e-4
    kernelize(model, {})
    assert report(model).bound_layers == 0 and not report(model).proven
    assert torch.equal(model(ids).logits, logits)
"""

USE_KERNELS = """
import tempfile
model, ids = tiny("qwen3_5", device), prompt(2, 9, device)
with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
    tokens = generate(model, ids)
    model.save_pretrained(folder)
    kernels.register_kernel_mapping(mapping(path, device))
    loaded = type(model).from_pretrained(folder, use_kernels=True).eval()
    assert torch.equal(generate(loaded, ids), tokens)
    assert report(loaded).calls == {"kernel: prefill": 3, "kernel: update": 21}
    loaded.train().eval()
    loaded(ids)
    assert report(loaded).calls["kernel: prefill"] == 6 and report(loaded).proven
"""

BOTH = """
from short_conv_transformers import patch, unpatch
model, ids = tiny("qwen3_5", device), prompt(2, 9, device)
with torch.no_grad():
    expected = model(ids).logits
    model.use_kernels = True  # no kernel for it: every block's own forward, put into the instance
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    patch(model, kernel, strict=True)
    assert (model(ids).logits - expected).abs().max() <= 1e-4
    assert report(model).proven
    model.train().eval()  # kernelizes again, over the patch
    assert torch.equal(model(ids).logits, expected)
    assert report(model).bound_layers == 0 and "displaced" in str(report(model))
    unpatch(model)
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before
    patch(model, kernel, strict=True)
    unpatch(model)
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before
"""

KERNEL_CONFIG = """
from transformers import KernelConfig
model = tiny("lfm2", device)
config = KernelConfig({"causal_conv1d_fn": f"{path}:causal_conv1d_fn"}, use_local_kernel=True)
try:
    model.set_use_kernels(True, config)
except ValueError as refusal:
    assert "Only devices in" in str(refusal), refusal
else:
    raise AssertionError("KernelConfig takes the CPU now: say so in docs/transformers.md")
"""


def run(program, kernel, device, *args):
    here = Path(__file__).parent
    subprocess.run(
        [sys.executable, "-c", START + program, os.path.dirname(kernel.__file__), str(here),
         device.type, *args],
        check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


def test_kernelize_with_our_functions(kernel, device):
    """Every family of the table."""
    run(FUNCTIONS, kernel, device)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_kernelize_with_our_block(kernel, device, family):
    run(BLOCKS, kernel, device, family)


def test_use_kernels_with_a_registered_mapping(kernel, device):
    if device.type == "cuda":
        pytest.skip("transformers registers its own cuda mapping over it")
    run(USE_KERNELS, kernel, device)


def test_patch_beside_use_kernels(kernel, device):
    """Patch after it; what switches kernels again displaces the patch, and the report says so."""
    if device.type == "cuda":
        pytest.skip("use_kernels asks the hub on a GPU")
    run(BOTH, kernel, device)


def test_kernel_config_does_not_know_the_cpu(kernel, device):
    if device.type == "cuda":
        pytest.skip("about the CPU")
    run(KERNEL_CONFIG, kernel, device)
