"""Finds the kernel: a loaded module, a path, a repo id, or the first of the usual places."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

from kernels import get_kernel, get_local_kernel

REPO_ID = "shortconv/short-conv"
VERSION = 1
BUILD = Path(__file__).resolve().parents[2] / "build"


def load_kernel(kernel: ModuleType | Path | str | None = None) -> ModuleType:
    """The kernel module.

    Args:
        kernel: an already loaded module; a path to a built package (its root, build folder or
            variant); a repo id "org/name"; or None for, in this order, the path in
            SHORT_CONV_KERNEL, the build folder of a source checkout, and the hub.

    Raises:
        TypeError: kernel is none of these.
        RuntimeError: nothing could be loaded; the text says what was tried.
    """
    if isinstance(kernel, ModuleType):
        if not hasattr(kernel, "causal_conv1d_update"):
            raise TypeError(f"kernel must be a short-conv module, got {kernel.__name__}")
        return kernel
    if isinstance(kernel, Path) or (isinstance(kernel, str) and Path(kernel).exists()):
        return get_local_kernel(Path(kernel))
    if isinstance(kernel, str):
        return get_kernel(kernel, version=VERSION)
    if kernel is not None:
        raise TypeError(
            f"kernel must be a module, a path, a repo id or None, got {type(kernel).__name__}"
        )
    tried = []
    for place, load in _usual_places():
        try:
            return load()
        except Exception as error:  # any failure of one place means: try the next, and say so
            tried.append(f"{place}: {type(error).__name__}: {error}")
    raise RuntimeError("no short-conv kernel found\n  " + "\n  ".join(tried or ["nothing to try"]))


def _usual_places():
    named = os.environ.get("SHORT_CONV_KERNEL")
    if named:
        yield f"SHORT_CONV_KERNEL={named}", lambda: get_local_kernel(Path(named))
    if BUILD.is_dir():
        yield str(BUILD), lambda: get_local_kernel(BUILD)
    if os.environ.get("USE_HUB_KERNELS", "YES").upper() not in ("NO", "OFF", "0", "FALSE"):
        yield f"hub {REPO_ID}", lambda: get_kernel(REPO_ID, version=VERSION)
