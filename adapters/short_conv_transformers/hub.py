"""The function-level road: our layers through `kernels`' own mapping, on unchanged transformers.

It is process-wide: transformers has one function object per modeling file, so every model of a
family in the process switches together. `patch` does not have that reach.
"""

from __future__ import annotations

from pathlib import Path

from kernels import LocalLayerRepository, Mode

LAYERS = ("causal_conv1d_fn", "causal_conv1d_update")


def mapping(kernel_path: Path, device: str = "cpu") -> dict:
    """A mapping of the two conv functions for `kernels.use_kernel_mapping`.

    Args:
        kernel_path: a built package: its root, build folder or variant.
        device: "cpu" or "cuda".
    """
    mode = Mode.INFERENCE | Mode.TORCH_COMPILE
    return {
        name: {device: {mode: LocalLayerRepository(repo_path=Path(kernel_path), layer_name=name)}}
        for name in LAYERS
    }
