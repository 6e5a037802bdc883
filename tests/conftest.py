"""The kernel under test, always a built variant loaded the way that users load it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from kernels import get_local_kernel

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"


# fp32 means fp32 where a model is compared with itself: cuDNN and Triton would take TF32.
torch.backends.cudnn.allow_tf32 = False
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

# Tests that compare threads set their own number; the others share the cores between workers.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def newest_build(backend: str) -> Path | None:
    """The variant of a backend that was built last, whatever its CUDA version."""
    kind = "cpu" if backend == "cpu" else "cu[0-9]*"
    found = BUILD.glob(f"torch-stable-abi*-{kind}-*")
    return max(found, key=lambda variant: variant.stat().st_mtime, default=None)


@pytest.fixture(scope="session")
def cpu_build() -> Path:
    """The directory of the built CPU variant."""
    return newest_build("cpu") or pytest.fail("no CPU build: run `python tools/build.py cpu`")


@pytest.fixture(scope="session")
def cuda_build() -> Path:
    """The directory of the built CUDA variant."""
    return newest_build("cuda") or pytest.skip("no CUDA build: run `python tools/build.py cuda`")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def kernel(device):
    """The loaded hub module: SHORT_CONV_KERNEL, or the variant built for the device in use."""
    named = os.environ.get("SHORT_CONV_KERNEL")
    path = Path(named) if named else newest_build(device.type)
    if path is None or not path.exists():
        pytest.fail(f"no build for {device.type}: run `python tools/build.py {device.type}`")
    return get_local_kernel(path, backend="cpu" if device.type == "cpu" else None)


@pytest.fixture(scope="session")
def reference(kernel):
    """The fp64 oracle that the package carries."""
    return kernel.reference


@pytest.fixture(scope="session")
def emulated() -> bool:
    """Whether the kernel under test runs the CUDA kernels on the host (tests/emulation)."""
    return "emulated" in os.environ.get("SHORT_CONV_KERNEL", "")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(20)


@pytest.fixture
def nan_empty(monkeypatch):
    """Uninitialised tensors hold NaN, so that an output left unwritten shows."""

    def filled(make):
        def make_filled(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return make_filled

    for owner, name in [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]:
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))
