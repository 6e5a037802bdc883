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
on_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the emulation is built for x86-64"
)


@on_x86
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


@on_x86
def test_lanes_of_a_warp_meet(tmp_path):
    """Shared memory, shuffles and votes, with a host thread for each lane."""
    program = tmp_path / "warps"
    subprocess.run(
        ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-mfma", "-mf16c", "-pthread",
         f"-I{HERE / 'emulation'}", HERE / "emulation" / "warps.cpp", "-o", program],
        check=True,
    )  # fmt: skip
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "equal\n")
