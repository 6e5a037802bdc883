"""patch and unpatch: plan every block, raise before touching any, then bind each instance."""

from __future__ import annotations

import inspect
import logging
import types
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from .binding import HOOKED, PLAIN, Binding, Carrier, Declined, bound, is_ours
from .families import BY_BLOCK, CARRIERS, FAMILIES
from .loader import load_kernel
from .report import ATTRIBUTE, ModelReport, report
from .spec import Family

logger = logging.getLogger("short_conv_transformers")
REPLICATE = "_replicate_for_data_parallel"


@dataclass(frozen=True)
class Handle:
    """A patched model; leaving its `with` block restores the model."""

    model: nn.Module

    def report(self) -> ModelReport:
        return report(self.model)

    def unpatch(self) -> None:
        unpatch(self.model)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc) -> None:
        unpatch(self.model)


def patch(
    model: nn.Module, kernel: types.ModuleType | Path | str | None = None, strict: bool = False
) -> Handle:
    """Runs the short convolutions of a loaded transformers model on the kernels.

    Each known block of this one model is bound; other models, also of the same family, are not
    touched. Patching twice changes nothing.

    Args:
        model: any module that contains blocks of a known family.
        kernel: see `load_kernel`.
        strict: raise for a block that cannot be bound, and at any call that would not run the
            kernel.

    Returns:
        A handle, which is also a context manager that restores the model.

    Raises:
        ValueError: no block of a known family, or (strict) a block that cannot be bound.
        RuntimeError: no kernel found.
    """
    blocks = [
        (name, module, family)
        for name, module in model.named_modules()
        if (family := BY_BLOCK.get(key(module)))
    ]
    if not blocks:
        known = ", ".join(sorted(f.name for f in FAMILIES))
        raise ValueError(
            f"model must contain a block of a known family ({known}), got {type(model).__name__}"
        )
    plan = [(name, m, f, why_not(m, f)) for name, m, f in blocks if not is_patched(m)]
    refused = [f"{name}: {reason}" for name, _, _, reason in plan if reason]
    carriers = [
        (name, module, taken(module))
        for name, module in model.named_modules()
        if key(module) in CARRIERS and ATTRIBUTE not in module.__dict__
    ]
    refused += [
        f"{name}: {reason}, so packing stops here" for name, _, reason in carriers if reason
    ]
    if strict and refused:
        raise ValueError("strict: cannot bind\n  " + "\n  ".join(refused))
    module_kernel = load_kernel(kernel)
    told: set = set()
    for _, module, family, reason in plan:
        if reason:
            module.__dict__[ATTRIBUTE] = Declined(family, reason)
        else:
            bind(module, Binding(family, module_kernel, type(module).forward, strict, told))
    for _, module, reason in carriers:
        if not reason:
            bind(module, Carrier())
    count = sum(is_patched(m) for _, m, _ in blocks)
    logger.info("%d/%d short-conv layers run %s", count, len(blocks), module_kernel.__name__)
    for line in refused:
        logger.warning("short-conv declined %s", line)
    return Handle(model)


def unpatch(model: nn.Module) -> None:
    """Restores exactly what patch replaced. A forward that somebody replaced since is left."""
    for module in model.modules():
        if ATTRIBUTE not in module.__dict__:
            continue
        module.__dict__.pop(REPLICATE, None)
        for attribute in (PLAIN, HOOKED):
            if not is_ours(module.__dict__.get(attribute)):
                continue
            if attribute == HOOKED or module.__dict__[ATTRIBUTE].kept:
                module.__dict__[attribute] = types.MethodType(type(module).forward, module)
            else:
                del module.__dict__[attribute]
        del module.__dict__[ATTRIBUTE]


def key(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__name__


def is_patched(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get(ATTRIBUTE), Binding)


def bind(module: nn.Module, binding: Binding | Carrier) -> None:
    module.__dict__[ATTRIBUTE] = binding
    attribute = HOOKED if HOOKED in module.__dict__ else PLAIN
    binding.kept = attribute in module.__dict__
    module.__dict__[attribute] = types.MethodType(bound(type(module).forward), module)
    module.__dict__[REPLICATE] = types.MethodType(replicate, module)


def replicate(module: nn.Module) -> nn.Module:
    """nn.DataParallel's shallow copy, whose forward would still be the method of the original."""
    replica = getattr(type(module), REPLICATE)(module)
    for attribute in (PLAIN, HOOKED):
        if is_ours(method := replica.__dict__.get(attribute)):
            replica.__dict__[attribute] = types.MethodType(method.__func__, replica)
    return replica


def why_not(module: nn.Module, family: Family) -> str | None:
    """Why a block of a known family cannot be bound, or None."""
    original = type(module).forward
    raw = inspect.unwrap(original)
    parameters = tuple(inspect.signature(raw).parameters)
    if raw.__qualname__ != f"{family.block}.forward" or parameters != family.parameters:
        return f"forward is {raw.__qualname__}{parameters}, not the one of this transformers"
    missing = {"causal_conv1d_fn", "causal_conv1d_update", "update_conv_state"} - set(
        raw.__code__.co_names
    )
    if missing:
        return f"forward does not call {sorted(missing)}"
    if reason := taken(module):
        return reason
    conv = getattr(module, family.conv)
    if not isinstance(conv, nn.Conv1d):
        return f"{family.conv} is wrapped as {type(conv).__qualname__}, whose call would be skipped"
    W = conv.kernel_size[0]
    if conv.groups != conv.in_channels or conv.dilation != (1,) or not 1 <= W <= 8:
        return f"{family.conv} is not a depthwise convolution of width 1 to 8: {conv}"
    return None


def taken(module: nn.Module) -> str | None:
    """Whose forward stands in the module's own, or None. kernelize leaves the class's own there
    where it found no kernel."""
    replaced = module.__dict__.get(PLAIN)
    own = getattr(replaced, "__func__", None) is type(module).forward
    if replaced is None or own or HOOKED in module.__dict__:
        return None
    return f"forward was already replaced by {getattr(replaced, '__qualname__', replaced)}"
