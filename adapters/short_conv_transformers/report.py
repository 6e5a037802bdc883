"""Which layer is bound to what, and which route each of its calls took."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import nn

ATTRIBUTE = "_short_conv"  # where a block carries its binding


@dataclass(frozen=True)
class LayerReport:
    layer: str
    family: str
    bound: str  # the kernel module, or why the model's own forward runs
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def kernel_calls(self) -> int:
        return sum(n for route, n in self.calls.items() if route.startswith("kernel: "))

    @property
    def declined_calls(self) -> int:
        return sum(n for route, n in self.calls.items() if route.startswith("declined: "))


@dataclass(frozen=True)
class ModelReport:
    layers: tuple[LayerReport, ...]
    note: str = "calls traced by torch.compile are not counted"

    @property
    def calls(self) -> dict[str, int]:
        total: Counter[str] = Counter()
        for layer in self.layers:
            total.update(layer.calls)
        return dict(total)

    @property
    def proven(self) -> bool:
        """Every layer is bound, was called, and ran the kernel at each of its calls."""
        return all(
            layer.kernel_calls and layer.kernel_calls == sum(layer.calls.values())
            for layer in self.layers
        ) and self.bound_layers == len(self.layers)

    @property
    def bound_layers(self) -> int:
        return sum(not layer.bound.startswith("declined: ") for layer in self.layers)

    def __str__(self) -> str:
        lines = [f"short-conv: {self.bound_layers}/{len(self.layers)} layers bound"]
        lines += [f"  {route}: {n} calls" for route, n in sorted(self.calls.items())]
        by_binding: dict[tuple[str, str], list[str]] = {}
        for layer in self.layers:
            by_binding.setdefault((layer.family, layer.bound), []).append(layer.layer)
        for (family, bound), names in by_binding.items():
            shown = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
            lines.append(f"  {family} {shown} -> {bound}")
        return "\n".join([*lines, f"  ({self.note})"])


def report(model: nn.Module) -> ModelReport:
    """What a patched model's short-conv layers are bound to and did so far.

    Raises:
        ValueError: the model was never patched.
    """
    layers = tuple(
        bound.report(name, module)
        for name, module in model.named_modules()
        if hasattr(bound := module.__dict__.get(ATTRIBUTE), "report")
    )
    if not layers:
        raise ValueError(f"model must have been patched, got an unpatched {type(model).__name__}")
    return ModelReport(layers)
