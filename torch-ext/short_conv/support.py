"""What the compiled kernels can run, asked without running them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import calls, ops


def why_not(op: str | Callable, /, *args, **kwargs) -> str | None:
    """Why a call would be refused, or None when it runs on the compiled kernel.

    Args:
        op: "causal_conv1d" or "causal_conv1d_update", or the function itself.
        *args, **kwargs: the call's arguments.

    Returns:
        None, or the sentence that the call's error would carry. Nothing is computed or modified.
    """
    name = op if isinstance(op, str) else op.__name__
    if name not in ("causal_conv1d", "causal_conv1d_update", "causal_conv1d_fn"):
        raise ValueError(
            "op must be causal_conv1d, causal_conv1d_fn or causal_conv1d_update, got " + repr(op)
        )
    try:
        with _dry_run():
            getattr(ops, name)(*args, **kwargs)
    except (TypeError, ValueError, NotImplementedError) as refusal:
        return str(refusal)
    return None


class _dry_run(torch.utils._python_dispatch.TorchDispatchMode):
    """Stops this package's ops after the contract; everything else (allocation) runs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        rules = calls.RULES.get(func)
        return rules(*args) if rules else func(*args, **(kwargs or {}))
