"""The CPU backend's instruction set levels give the same bits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import sys
from pathlib import Path
import torch
from kernels import get_local_kernel

k = get_local_kernel(Path(sys.argv[1]))
torch.manual_seed(0)
results = []
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for T, D in ((70, 1), (70, 7), (70, 8), (70, 33), (70, 600), (70, 640), (2100, 4128)):
        x = (3 * torch.randn(2, T, D)).to(dtype)
        w = torch.randn(D, 4).to(dtype)
        s = torch.randn(2, D, 4).to(dtype)
        y, f = k.causal_conv1d(x, w, activation="silu", initial_state=s, return_final_state=True)
        results += [y, f, k.causal_conv1d_update(x[:, 0].contiguous(), s, w, activation="silu"), s]
        leaves = [t.clone().requires_grad_() for t in (x, w, s)]
        outputs = k.causal_conv1d(
            *leaves[:2], activation="silu", initial_state=leaves[2], return_final_state=True
        )
        results += torch.autograd.grad(outputs, leaves, (y, f))
special = torch.tensor([0.0, -0.0, 1e-40, 88.8, -88.8, 3e38, -3e38, float("inf"), float("nan")])
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    x = special.to(dtype).reshape(1, 1, -1)
    results.append(k.causal_conv1d(x, torch.ones(9, 1), activation="silu").nan_to_num(5.0))
    x = x.repeat(1, 12, 64)
    results.append(k.causal_conv1d(x, torch.ones(576, 2), activation="silu").nan_to_num(5.0))
torch.save(results, sys.argv[2])
"""


def test_levels_agree_bitwise(kernel, device, emulated, tmp_path):
    if device.type != "cpu" or emulated:
        pytest.skip("levels are the CPU backend's")
    variant = os.path.dirname(kernel.__file__)
    results = {}
    for level in ("baseline", "avx2", "avx512"):  # a level the processor lacks falls to baseline
        path = tmp_path / f"{level}.pt"
        subprocess.run(
            [sys.executable, "-c", PROGRAM, variant, str(path)],
            env={**os.environ, "SHORT_CONV_CPU_ISA": level}, check=True,
        )  # fmt: skip
        results[level] = torch.load(path)
    for level in ("avx2", "avx512"):
        for ours, base in zip(results[level], results["baseline"], strict=False):
            assert torch.equal(ours, base)
