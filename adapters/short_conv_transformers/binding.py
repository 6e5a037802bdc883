"""One block bound to the kernel: the model's own forward code, run with other conv functions.

The forward's code object is executed with a copy of its module's globals in which the two conv
functions (and the delta rules, for packed rows) are this binding's, and with a view of the cache
whose `update_conv_state` hands the state over instead of concatenating it. Everything else in the
block is the model's. Nothing outside the one module instance changes.
"""

from __future__ import annotations

import copy
import inspect
import logging
import types
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.integrations.accelerate import force_accelerate_hooks

from .report import ATTRIBUTE, LayerReport
from .segments import bounds, run_by_segment
from .spec import Family

logger = logging.getLogger("short_conv_transformers")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass
class Call:
    """One forward of one block: where its conv state comes from and goes to."""

    cu_seqlens: Tensor | None
    seq_idx: Tensor | None
    initial: Tensor | None = None
    final: Tensor | None = None
    recording: bool = False


class CacheView:
    """The model's cache, except that a block's new inputs are not copied into or behind its
    state: the kernel reads and writes the state in place."""

    def __init__(self, cache, call: Call):
        self._cache = cache
        self._call = call

    def __getattr__(self, name: str):
        return getattr(self._cache, name)

    def update_conv_state(self, conv_states, layer_idx, state_idx=0, conv_kernel_size=None, **kw):
        layer = self._cache.layers[layer_idx]
        if self._cache.is_recording_past(layer_idx):
            # Assisted decoding keeps every input for a later crop: the cache's own business.
            self._call.recording = True
            return self._cache.update_conv_state(
                conv_states, layer_idx, state_idx, conv_kernel_size=conv_kernel_size, **kw
            )
        if not layer.is_conv_states_initialized[state_idx]:
            layer.lazy_initialization(
                conv_states=conv_states, state_idx=state_idx, conv_kernel_size=conv_kernel_size
            )
        state = layer.conv_states[state_idx]
        self._call.initial = state if layer.has_previous_state[state_idx] else None
        self._call.final = state
        layer.has_previous_state[state_idx] = True
        return conv_states


class Binding:
    def __init__(self, family: Family, kernel: types.ModuleType, original, strict: bool):
        self.family = family
        self.kernel = kernel
        self.original = original  # the class's forward, unbound
        self.strict = strict
        self.calls: Counter[str] = Counter()
        self.call: Call | None = None
        self.run = self._rebuilt()

    def __deepcopy__(self, memo) -> Binding:
        return Binding(self.family, self.kernel, self.original, self.strict)

    def _rebuilt(self):
        raw = inspect.unwrap(self.original)
        names = dict(raw.__globals__)
        # Without a module name torch.compile reads this dict instead of importing the module.
        names.pop("__name__", None)
        names[self.family.fn] = self._prefill
        names[self.family.update] = self._update
        for rule in self.family.chunk_rules:
            names[rule] = self._by_segment(names[rule])
        rebuilt = types.FunctionType(
            raw.__code__, names, raw.__name__, raw.__defaults__, raw.__closure__
        )
        rebuilt.__kwdefaults__ = copy.copy(raw.__kwdefaults__)
        return force_accelerate_hooks(self.family.conv)(rebuilt)

    def __call__(self, module: nn.Module, hidden_states: Tensor, *args, **kwargs):
        reason = self.why_not(module, hidden_states)
        if reason is not None:
            self._count(f"declined: {reason}")
            if self.strict:
                raise RuntimeError(
                    f"strict: {self.family.block} would not run the kernel: {reason}"
                )
            return self.original(module, hidden_states, *args, **kwargs)
        call = Call(*self._packing(kwargs))
        cache = kwargs.get("cache_params", args[0] if args else None)
        if cache is not None:
            view = CacheView(cache, call)
            if "cache_params" in kwargs:
                kwargs["cache_params"] = view
            else:
                args = (view, *args[1:])
        outer, self.call = self.call, call
        try:
            return self.run(module, hidden_states, *args, **kwargs)
        finally:
            self.call = outer

    def why_not(self, module: nn.Module, hidden_states: Tensor) -> str | None:
        """Why this call runs the model's own forward, or None."""
        conv = getattr(module, self.family.conv)
        if torch.is_grad_enabled() and (hidden_states.requires_grad or conv.weight.requires_grad):
            return "gradients are enabled and the kernels have no backward yet"
        if hidden_states.dtype not in FLOATS:
            return f"no kernel for {hidden_states.dtype}"
        if hidden_states.device.type not in ("cpu", "cuda"):
            return f"no kernel for device {hidden_states.device.type}"
        if conv._forward_hooks or conv._forward_pre_hooks:
            return f"{self.family.conv} has forward hooks, which reading its weight would skip"
        return None

    def _packing(self, kwargs: dict) -> tuple[Tensor | None, Tensor | None]:
        """(cu_seqlens, seq_idx) for the convolution; offsets win when both are given, since a
        collator derives one from the other; the kernel's checking mode compares them."""
        named = [n for n in ("cu_seq_lens_q", "cu_seqlens") if kwargs.get(n) is not None]
        cu_seqlens = kwargs[named[0]] if named else None
        seq_idx = kwargs.get("seq_idx")
        if len(named) == 2 and kwargs[named[1]] is not cu_seqlens:
            raise ValueError("cu_seq_lens_q and cu_seqlens must be the same tensor, got two")
        if cu_seqlens is not None and seq_idx is not None:
            self.kernel.layers.compare_packing(cu_seqlens, seq_idx)
            seq_idx = None
        return cu_seqlens, seq_idx

    def _prefill(self, x, weight, bias=None, activation=None, **kwargs):
        call = self.call
        how = "continued prefill" if call.initial is not None else "prefill"
        if call.recording:
            how = "prefill with recorded past"
        if call.cu_seqlens is not None or call.seq_idx is not None:
            if call.recording:
                raise ValueError("packed rows must not meet a cache that records its past")
            how = f"packed {how}"
        y = self.kernel.causal_conv1d(
            x.transpose(1, 2),
            weight,
            bias,
            activation=activation,
            initial_state=None if call.initial is None else self._one_a_sequence(call.initial),
            final_state_out=None if call.cu_seqlens is not None else call.final,
            cu_seqlens=call.cu_seqlens,
            seq_idx=call.seq_idx,
            return_final_state=call.cu_seqlens is not None and call.final is not None,
        )
        if isinstance(y, tuple):
            y, states = y
            call.final.copy_(self._last_that_has_rows(states))
        self._count(f"kernel: {how}")
        return y.transpose(1, 2)

    def _one_a_sequence(self, state: Tensor) -> Tensor:
        """A packed row continues its cache with its first sequence only."""
        if self.call.cu_seqlens is None:
            return state
        states = state.new_zeros(self.call.cu_seqlens.shape[0] - 1, *state.shape[1:])
        states[:1] = state
        return states

    def _last_that_has_rows(self, states: Tensor) -> Tensor:
        """The cache goes on with the last sequence; empty ones behind it only pad offsets."""
        lengths = self.call.cu_seqlens.diff()
        order = torch.arange(lengths.numel(), device=lengths.device)
        return states.index_select(0, torch.where(lengths > 0, order, 0).amax().view(1))

    def _update(self, x, conv_state, weight, bias=None, activation=None):
        y = self.kernel.causal_conv1d_update(x, conv_state, weight, bias, activation)
        self._count("kernel: update")
        return y

    def _by_segment(self, rule):
        def delta_rule(*tensors, cu_seqlens=None, seq_idx=None, initial_state=None, **kwargs):
            call = self.call
            for known in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
                kwargs.pop(known, None)
            if call.cu_seqlens is None and call.seq_idx is None:
                return rule(*tensors, initial_state=initial_state, **kwargs)
            B, T = tensors[0].shape[:2]
            gates = {name: kwargs.pop(name) for name in ("g", "beta") if name in kwargs}
            segments = bounds(call.cu_seqlens, call.seq_idx, B, T)
            return run_by_segment(rule, tensors, gates, segments, initial_state, **kwargs)

        return delta_rule

    def _count(self, route: str) -> None:
        if torch.compiler.is_compiling():
            return
        if route not in self.calls:
            logger.info("%s: %s", self.family.block, route)
        self.calls[route] += 1

    def report(self, name: str, module: nn.Module) -> LayerReport:
        bound = self.kernel.__name__
        if not any(is_ours(module.__dict__.get(a)) for a in ("forward", "_old_forward")):
            bound = "declined: displaced, the forward was replaced after patching"
        return LayerReport(name, self.family.name, bound, dict(self.calls))


@dataclass
class Declined:
    """A block of a known family that patch() left alone, and why."""

    family: Family
    reason: str

    def report(self, name: str, module: nn.Module) -> LayerReport:
        return LayerReport(name, self.family.name, f"declined: {self.reason}")


def forward(self, *args, **kwargs):
    """What a patched block's forward is: its own binding's call, also in a deep copy."""
    return self.__dict__[ATTRIBUTE](self, *args, **kwargs)


def is_ours(attribute: object) -> bool:
    return isinstance(attribute, types.MethodType) and attribute.__func__ is forward
