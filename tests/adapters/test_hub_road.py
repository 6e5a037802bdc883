"""The function-level road: our layers bound by kernels' own kernelize, transformers unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers.models.qwen3_5")

PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import kernels, torch
from kernels import Mode, use_kernel_mapping
from models import prompt, tiny
from short_conv_transformers import load_kernel, mapping

path, device = Path(sys.argv[1]), sys.argv[3]
model, ids = tiny(sys.argv[4], device), prompt(2, 9, device)
with torch.no_grad():
    logits = model(ids).logits
    tokens = model.generate(ids, max_new_tokens=8, do_sample=False)
    kernel, calls = load_kernel(path), []
    for name in ("fwd", "update"):
        real = getattr(kernel.calls, name)
        setattr(kernel.calls, name, lambda *a, real=real, name=name: (calls.append(name), real(*a))[1])
    with use_kernel_mapping(mapping(path, device), inherit_mapping=False):
        kernels.kernelize(model, device=device, mode=Mode.INFERENCE)
    assert (model(ids).logits - logits).abs().max() <= 1e-4
    assert calls == ["fwd"] * 3, calls
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), tokens)
    assert (calls.count("fwd"), calls.count("update")) == (6, 21), calls
    with use_kernel_mapping({}, inherit_mapping=False):
        kernels.kernelize(model, device=device, mode=Mode.INFERENCE)
    calls.clear()
    assert torch.equal(model(ids).logits, logits) and not calls
"""  # noqa: E501


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_kernelize_with_our_layers(kernel, device, family):
    """In a process of its own: the road switches every model of a family in the process."""
    here = Path(__file__).parent
    subprocess.run(
        [sys.executable, "-c", PROGRAM, os.path.dirname(kernel.__file__), str(here), device.type,
         family],
        check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
