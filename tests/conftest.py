"""The kernel under test, always a built variant loaded the way that users load it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"


def variant_dir(backend: str) -> Path | None:
    """The built variant of a backend, whatever its CUDA version."""
    kind = "cpu" if backend == "cpu" else "cu*"
    found = sorted(BUILD.glob(f"torch-stable-abi*-{kind}-*"))
    return found[-1] if found else None


def load(path: Path):
    from kernels import get_local_kernel

    return get_local_kernel(path)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def kernel(device):
    """The loaded hub module: SHORT_CONV_KERNEL, or the variant built for the device in use."""
    named = os.environ.get("SHORT_CONV_KERNEL")
    path = Path(named) if named else variant_dir(device.type)
    if path is None or not path.exists():
        backend = "cuda" if device.type == "cuda" else "cpu"
        pytest.fail(f"no built variant for {device}: run `python tools/build.py {backend}`")
    return load(path)


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
