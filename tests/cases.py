"""Inputs, oracle comparison and the one table of tolerances."""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# A result is the fp64 one rounded once to its dtype: half an ulp of it, plus what fp32
# accumulation of W products and an fp32 SiLU leave (a few 2^-24 of the largest term, absolute where
# terms cancel). fp16 results below 2^-14 have ulps of 2^-24.
HALF_ULP = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-24,
            torch.float64: 2.0**-53}  # fmt: skip
ACCUMULATION = {torch.float64: 2.0**-50}
TINY = {torch.float16: 2.0**-24}


def assert_rounded(got: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor | float) -> None:
    """got equals exact rounded once; scale bounds the terms that were summed."""
    assert got.shape == exact.shape
    relative = ACCUMULATION.get(got.dtype, 2.0**-21)
    # A rounding boundary may lie between exact and what was accumulated: a whole ulp then.
    allowed = 2 * HALF_ULP[got.dtype] * exact.abs() + relative * scale + TINY.get(got.dtype, 0.0)
    error = (got.double() - exact).abs()
    worst = (error - allowed).max().item() if error.numel() else -1.0
    assert not torch.isnan(got).any(), "NaN in the result"
    assert worst <= 0, f"off by {worst:.3g} more than rounding allows"


def largest(tensor: torch.Tensor | None) -> float:
    return tensor.nan_to_num().abs().max().item() if tensor is not None and tensor.numel() else 0.0


def scale_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *states) -> float:
    """A bound on the terms of any sum; NaN elements are those that must not take part."""
    taps = weight.double().abs().sum(1).max().item() if weight.numel() else 0.0
    return 1.0 + max(map(largest, (x, *states))) * taps + largest(bias)


def randn(*shape: int, dtype=torch.float32, device="cpu", layout: str = "contiguous"):
    """Normal values; every byte around a view that is not of it is NaN."""
    if layout == "contiguous":
        return torch.randn(*shape, device=device).to(dtype)
    values = torch.randn(*shape, device=device).to(dtype)
    *lead, T, D = shape
    if layout == "slice":  # columns of a wider projection, 16-byte aligned
        base = torch.full((*lead, T, D + 24), float("nan"), dtype=dtype, device=device)
        view = base[..., 8 : 8 + D]
    elif layout == "odd":  # pitch and offset that break every alignment
        base = torch.full((*lead, T, D + 3), float("nan"), dtype=dtype, device=device)
        view = base[..., 1 : 1 + D]
    elif layout == "channel_first":
        view = torch.full((*lead, D, T), float("nan"), dtype=dtype, device=device).transpose(-1, -2)
    elif layout == "channel_first_slice":  # a window of longer rows, off every alignment
        base = torch.full((*lead, D, T + 5), float("nan"), dtype=dtype, device=device)
        view = base[..., 3 : 3 + T].transpose(-1, -2)
    elif layout == "scattered":
        base = torch.full((*lead, T * 2, D * 3), float("nan"), dtype=dtype, device=device)
        view = base[..., ::2, ::3]
    else:
        raise ValueError(layout)
    return view.copy_(values)


LAYOUTS = ("contiguous", "slice", "odd", "channel_first", "channel_first_slice", "scattered")


def at_offset(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values that many elements into a storage, where vector loads are misaligned."""
    base = torch.full(
        (tensor.numel() + elements,), float("nan"), dtype=tensor.dtype, device=tensor.device
    )
    return base[elements:].view(tensor.shape).copy_(tensor)


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a gap after each along the last dim."""
    *lead, last = tensor.shape
    wide = torch.full((*lead, 2 * last), 77, device=tensor.device).to(tensor.dtype)
    return wide[..., ::2].copy_(tensor)


def offsets(lengths, device, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)
