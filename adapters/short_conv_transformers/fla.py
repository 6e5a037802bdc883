"""flash-linear-attention on the kernels: its causal_conv1d functions, and through them every
`ShortConvolution`.

fla's modules look their functions up at each call, so the functions are what is replaced, in every
module of fla that holds them: for the whole process, until undone.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .binding import differentiates, refusal
from .loader import load_kernel
from .report import LayerReport, ModelReport

logger = logging.getLogger("short_conv_transformers")
HOME = "fla.modules.causal_conv1d.ops"


@dataclass(frozen=True)
class Place:
    """A name in one of fla's modules, and what stood there."""

    module: types.ModuleType
    name: str
    original: Callable
    ours: Callable

    def restore(self) -> None:
        if getattr(self.module, self.name) is self.ours:
            setattr(self.module, self.name, self.original)


class Handle:
    """fla on the kernels; leaving its `with` block restores fla."""

    def __init__(self, functions: tuple[Function, ...], places: tuple[Place, ...]):
        self.functions = functions
        self.places = places

    def report(self) -> ModelReport:
        stands = {id(getattr(place.module, place.name)) for place in self.places}
        return ModelReport(tuple(f.report(id(f.call) in stands) for f in self.functions))

    def unpatch(self) -> None:
        for place in self.places:
            place.restore()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc) -> None:
        self.unpatch()


def patch(kernel: types.ModuleType | Path | str | None = None, strict: bool = False) -> Handle:
    """Runs fla's causal_conv1d and causal_conv1d_update on the kernels.

    Args:
        kernel: see `load_kernel`.
        strict: raise at any call that would not run the kernel.

    Returns:
        A handle with the report and the undo. Patching twice stacks: the last handle undoes first.

    Raises:
        ImportError: no fla.
        RuntimeError: no kernel found.
    """
    home = importlib.import_module(HOME)
    module = load_kernel(kernel)
    functions = (
        Prefill("causal_conv1d", home.causal_conv1d, module, strict),
        Decode("causal_conv1d_update", home.causal_conv1d_update, module, strict),
    )
    places = tuple(
        Place(holder, name, function.original, function.call)
        for function in functions
        for holder in list(sys.modules.values())
        if getattr(holder, "__name__", "").startswith("fla.")
        for name, value in list(vars(holder).items())
        if value is function.original
    )
    for place in places:
        setattr(place.module, place.name, place.ours)
    logger.info("fla's %s run %s", " and ".join(f.name for f in functions), module.__name__)
    return Handle(functions, places)


class Function:
    """One of fla's functions: counts its calls, and declines what the kernels do not do."""

    def __init__(self, name: str, original: Callable, kernel: types.ModuleType, strict: bool):
        self.name = name
        self.original = original
        self.kernel = kernel
        self.strict = strict
        self.calls: Counter[str] = Counter()
        self.call = self._entry()

    def _entry(self) -> Callable:
        # A plain function, as fla's is: a bound method is a new object at each look-up.
        def call(*args, **kwargs):
            return self(*args, **kwargs)

        call.__name__, call.__wrapped__ = self.name, self.original
        return call

    def _routed(self, reason: str | None, how: str) -> bool:
        """Counts the call; whether the kernel runs it."""
        route = f"kernel: {how}" if reason is None else f"declined: {reason}"
        if not torch.compiler.is_compiling():
            if route not in self.calls:
                logger.info("fla.%s: %s", self.name, route)
            self.calls[route] += 1
        if reason is not None and self.strict:
            raise RuntimeError(f"strict: fla.{self.name} would not run the kernel: {reason}")
        return reason is None

    def report(self, stands: bool) -> LayerReport:
        bound = self.kernel.__name__ if stands else "declined: displaced or undone"
        return LayerReport(self.name, "fla", bound, dict(self.calls))


class Prefill(Function):
    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool | None = False,
        activation: str | None = None,
        backend: str | None = "triton",
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        cp_context=None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        seq_idx = kwargs.get("seq_idx") if cu_seqlens is None else None
        others = sorted(name for name, value in kwargs.items() if value is not None)
        how = "prefill" if initial_state is None else "continued prefill"
        if cu_seqlens is not None or seq_idx is not None:
            how = f"packed {how}"
        reason = why_not(self.kernel, x, weight, bias, initial_state)
        if cp_context is not None:
            reason = "context parallelism is fla's own"
        elif others not in ([], ["seq_idx"]):
            reason = f"unknown keywords {others}"
        if not self._routed(reason, how):
            return self.original(
                x=x, weight=weight, bias=bias, residual=residual, initial_state=initial_state,
                output_final_state=output_final_state, activation=activation, backend=backend,
                cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, chunk_indices=chunk_indices,
                cp_context=cp_context, **kwargs,
            )  # fmt: skip
        taps = self.kernel.layers.taps
        y = self.kernel.causal_conv1d(
            x.flatten(2),
            taps(weight, x),
            taps(bias, x),
            activation=activation,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            seq_idx=seq_idx,
            return_final_state=bool(output_final_state),
        )
        y, final_state = y if output_final_state else (y, None)
        y = y.view(x.shape)
        return y if residual is None else y + residual, final_state


class Decode(Function):
    def __call__(
        self,
        x: Tensor,
        cache: Tensor,
        residual: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        reason = why_not(self.kernel, x, weight, bias, cache)
        if differentiates(x, weight, bias, cache):
            reason = "a decode step has no gradients"
        if not self._routed(reason, "update"):
            return self.original(
                x=x, cache=cache, residual=residual, weight=weight, bias=bias,
                activation=activation,
            )  # fmt: skip
        taps = self.kernel.layers.taps
        # One token a sequence: [N, D], [1, N, D] or [N, 1, D], the channels perhaps in heads.
        y = self.kernel.causal_conv1d_update(
            x.reshape(-1, weight.shape[0]), cache, taps(weight, x), taps(bias, x), activation
        ).view(x.shape)
        return y if residual is None else y + residual, cache


def why_not(
    kernel: types.ModuleType,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    state: Tensor | None,
) -> str | None:
    """Why a call runs fla's own function, or None."""
    if weight is None:
        return "a convolution without a weight"
    gradients = differentiates(x, weight, bias, state)
    return refusal(kernel.why_not, x.device.type, x.dtype, weight.shape[-1], gradients)
