"""The official road: our layers through `kernels`' own mapping, on unchanged transformers.

At function level it is process-wide: transformers has one function object per modeling file, so
every model of a family in the process switches together. Qwen3.5 is also reached block by block,
which is what `patch` does for every family.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernels import LocalLayerRepository, Mode
from torch import nn

from .binding import Binding
from .families import BY_BLOCK
from .loader import load_kernel
from .report import ATTRIBUTE

BLOCK = "Qwen3_5GatedDeltaNet"  # the one block name that transformers looks up, dense and MoE


def mapping(kernel_path: Path, device: str = "cpu", blocks: bool = True) -> dict:
    """A mapping for `kernels.use_kernel_mapping` or `kernels.register_kernel_mapping`.

    Args:
        kernel_path: a built package: its root, build folder or variant.
        device: "cpu" or "cuda".
        blocks: also the whole block of Qwen3.5, whose convolution then reads and writes the cache
            in place and keeps packed rows apart.
    """
    path = Path(kernel_path)
    inference, training = Mode.INFERENCE | Mode.TORCH_COMPILE, Mode.TRAINING | Mode.TORCH_COMPILE
    fn = LocalLayerRepository(repo_path=path, layer_name="causal_conv1d_fn")
    update = LocalLayerRepository(repo_path=path, layer_name="causal_conv1d_update")
    found = {
        "causal_conv1d_fn": {device: {inference: fn, training: fn}},
        "causal_conv1d_update": {device: {inference: update}},
    }
    if blocks:
        block = BlockRepository(path)
        found[BLOCK] = {device: {inference: block, training: block}}
    return found


@dataclass(frozen=True)
class BlockRepository:
    """Where `kernels` loads a block's layer from: the block's own code, bound as `patch` binds."""

    kernel_path: Path

    def load(self) -> type[nn.Module]:
        kernel = load_kernel(self.kernel_path)

        class GatedDeltaNet(nn.Module):
            can_torch_compile = True
            has_backward = True

            # Here self is the model's block, not an instance of this class.
            def forward(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
                binding = self.__dict__.get(ATTRIBUTE)
                if binding is None:
                    family = BY_BLOCK[type(self).__module__, type(self).__name__]
                    binding = Binding(family, kernel, type(self).forward, entry=entry)
                    self.__dict__[ATTRIBUTE] = binding
                return binding(self, hidden_states, cache_params, attention_mask, **kwargs)

        entry = GatedDeltaNet.forward
        return GatedDeltaNet
