"""The built variants load offline in every way that users load them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# One prefill that returns its state, then one decode step: both ops, checked against conv1d.
USE = """
import torch

torch.manual_seed(0)
x, weight = torch.randn(2, 7, 32), torch.randn(32, 4)
expected = torch.nn.functional.silu(
    torch.nn.functional.conv1d(x.mT, weight[:, None], padding=3, groups=32)[..., :7]
).mT
y, state = kernel.causal_conv1d(x[:, :6], weight, activation="silu", return_final_state=True)
last = kernel.causal_conv1d_update(x[:, 6], state, weight, activation="silu")
torch.testing.assert_close(torch.cat([y, last[:, None]], 1), expected)
print("loaded", kernel.__name__)
"""


def run(code: str, cwd: Path, **environment: str) -> str:
    """Runs code in a fresh, offline interpreter: what one load registers does not help another."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_get_local_kernel(cpu_build, tmp_path):
    load = f"""
from pathlib import Path
from kernels import get_local_kernel

kernel = get_local_kernel(Path({str(cpu_build.parent.parent)!r}), backend="cpu")
"""
    assert "loaded _short_conv_cpu_" in run(load + USE, tmp_path)


def test_get_kernel_with_local_kernels(cpu_build, tmp_path):
    load = """
from kernels import get_kernel

kernel = get_kernel("shortconv/short-conv", version=1, backend="cpu")
"""
    local = f"shortconv/short-conv={cpu_build.parent.parent}"
    assert "loaded _short_conv_cpu_" in run(load + USE, tmp_path, LOCAL_KERNELS=local)


def test_import_by_python_name(cpu_build, tmp_path):
    load = "import short_conv as kernel\n"
    assert "loaded short_conv" in run(load + USE, tmp_path, PYTHONPATH=str(cpu_build))


def test_both_variants_in_one_process(cpu_build, cuda_build, tmp_path):
    load = f"""
from pathlib import Path
from kernels import get_local_kernel

for variant in ({str(cpu_build)!r}, {str(cuda_build)!r}):
    kernel = get_local_kernel(Path(variant))
"""
    assert "loaded _short_conv_cuda_" in run(load + USE, tmp_path)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_cuda_variant_on_a_cpu_torch(cuda_build, tmp_path):
    code = f"""
from pathlib import Path
from kernels import get_local_kernel

kernel = get_local_kernel(Path({str(cuda_build)!r}))
"""
    registered = """
for name in ("fwd", "update", "states"):
    op = kernel.__name__ + "::" + name
    for key in ("CPU", "CUDA", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op, key), (op, key)

fwd = getattr(torch.ops, kernel.__name__).fwd.default
mutated = [a.name for a in fwd._schema.arguments if a.alias_info and a.alias_info.is_write]
assert mutated == ["out", "final_state"], mutated

from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    fake = kernel.causal_conv1d(torch.empty(2, 7, 32), torch.empty(32, 4))
assert fake.shape == (2, 7, 32)
"""
    assert "loaded _short_conv_cuda_" in run(code + USE + registered, tmp_path)
