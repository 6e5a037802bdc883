"""Projections that a block concatenates, convolves and splits again, convolved without the copies.

The block's code runs with a `torch` whose cat gives a `Joined` and whose split takes it apart. The
convolution then reads each projection where it is and leaves each result contiguous, which is how
the delta rules want query, key and value.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Joined:
    """[B, T, D_i] tensors that stand for their concatenation along D, or for its transpose."""

    def __init__(self, parts: list[Tensor], channels_first: bool = False):
        self.parts = parts
        self.channels_first = channels_first

    def tensor(self) -> Tensor:
        """The concatenation, copied together."""
        whole = torch.cat(self.parts, dim=-1)
        return whole.transpose(1, 2) if self.channels_first else whole

    def transpose(self, a: int, b: int) -> Joined:
        if {a % 3, b % 3} != {1, 2}:
            raise ValueError(f"transpose must swap time and channels, got dims {a} and {b}")
        return Joined(self.parts, not self.channels_first)

    @property
    def shape(self) -> torch.Size:
        B, T, _ = self.parts[0].shape
        D = sum(part.shape[-1] for part in self.parts)
        return torch.Size((B, D, T) if self.channels_first else (B, T, D))

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def __getitem__(self, index: tuple[slice, slice, slice]) -> Joined:
        """Blocks cut what a cache put in front: the last rows of time, all of the rest."""
        everything = slice(None)
        if not self.channels_first or index[:2] != (everything, everything):
            raise ValueError(f"index must select times of a [B, D, T] tensor, got {index}")
        return Joined([part[:, index[2]] for part in self.parts], True)


class Torch:
    """The torch module of a block that joins its projections."""

    def __getattr__(self, name: str):
        return getattr(torch, name)

    @staticmethod
    def cat(tensors, dim: int = 0):
        if dim == -1 and all(tensor.dim() == 3 for tensor in tensors):
            return Joined(list(tensors))
        return torch.cat(tensors, dim=dim)

    @staticmethod
    def split(tensor, sizes, dim: int = 0):
        if not isinstance(tensor, Joined):
            return torch.split(tensor, sizes, dim=dim)
        if tensor.channels_first or dim != -1 or [p.shape[-1] for p in tensor.parts] != [*sizes]:
            raise ValueError(f"split must give the joined parts back, got {sizes} along {dim}")
        return tuple(tensor.parts)
