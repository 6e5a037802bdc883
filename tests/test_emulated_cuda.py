"""The CUDA kernels against the same tests as the CPU ones, executed on the host."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the emulation is built for x86-64")
@pytest.mark.skipif("SHORT_CONV_KERNEL" in os.environ, reason="a kernel was named: test that one")
def test_cuda_kernels_on_the_host(tmp_path):
    spec = importlib.util.spec_from_file_location("emulation", HERE / "emulation" / "build.py")
    emulation = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(emulation)
    variant = emulation.build(tmp_path)
    names = ("fwd", "bwd", "update", "reports", "contract", "dropin")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
         *(str(HERE / f"test_{name}.py") for name in names)],
        env={**os.environ, "SHORT_CONV_KERNEL": str(variant), "CUDA_VISIBLE_DEVICES": "",
             "OMP_NUM_THREADS": "1"},
        check=True,
    )  # fmt: skip
