"""One block bound to the kernel: the model's own forward code, run with other conv functions.

The forward's code object is executed with a copy of its module's globals in which the two conv
functions (and, for packed rows, the delta rules) are this binding's, and with a view of the cache
whose `update_conv_state` hands the state over instead of concatenating it. Everything else in the
block is the model's. Nothing outside the one module instance changes.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.integrations.accelerate import force_accelerate_hooks

from .joined import Joined, Torch
from .report import ATTRIBUTE, LayerReport
from .segments import bounds, run_block, run_rule
from .spec import Family
from .state import CacheView, Call

logger = logging.getLogger("short_conv_transformers")
# Where a module's forward stands; accelerate's hooks keep the one that they wrap under the first.
HOOKED, PLAIN = "_old_forward", "forward"
PACKING = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "cu_seqlens",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)
NOT_REACHED = "declined: the block returned before its convolution"


class Running(threading.local):
    """What a block runs right now, for each thread by itself."""

    call: Call | None = None
    carried: dict[str, Tensor] = {}  # packing that the layer around the block was given


class Binding:
    """Runs one block's forward.

    Args:
        original: the class's forward, unbound.
        strict: raise at a call that would not run the kernel.
        told: routes that the log has, shared by the blocks of one patch.
        entry: the function that stands as the block's forward, where patch did not put it there.
    """

    def __init__(
        self,
        family: Family,
        kernel: types.ModuleType,
        original: Callable,
        strict: bool = False,
        told: set | None = None,
        entry: Callable | None = None,
    ):
        self.family = family
        self.kernel = kernel
        self.original = original
        self.strict = strict
        self.told = set() if told is None else told
        self.entry = bound(original) if entry is None else entry
        self.calls: Counter[str] = Counter()
        self.counting = threading.Lock()
        self.kept = False  # whether the class's own forward stood in the instance already
        self.running = Running()
        self.run = self._rebuilt()

    def __deepcopy__(self, memo) -> Binding:
        twin = Binding(self.family, self.kernel, self.original, self.strict, self.told, self.entry)
        twin.kept = self.kept
        return twin

    def _rebuilt(self):
        raw = inspect.unwrap(self.original)
        names = dict(raw.__globals__)
        # Without a module name torch.compile reads this dict instead of importing the module.
        names.pop("__name__", None)
        names["causal_conv1d_fn"] = self._prefill
        names["causal_conv1d_update"] = self._update
        for rule in self.family.rules:
            names[rule] = self._by_sequence(names[rule])
        if self.family.joined:
            names["torch"] = Torch()
        rebuilt = types.FunctionType(
            raw.__code__, names, raw.__name__, raw.__defaults__, raw.__closure__
        )
        rebuilt.__kwdefaults__ = copy.copy(raw.__kwdefaults__)
        return force_accelerate_hooks([self.family.conv, *self.family.hooked])(rebuilt)

    def __call__(self, module: nn.Module, hidden_states: Tensor, *args, **kwargs):
        named = dict(zip((self.family.cache, self.family.mask), args, strict=False)) | kwargs
        cache, mask = named.pop(self.family.cache, None), named.pop(self.family.mask, None)
        cu_seqlens, seq_idx = self.kernel.layers.packing(self.running.carried | named)
        packed = cu_seqlens is not None or seq_idx is not None
        if reason := self.why_not(module, hidden_states):
            self._count(f"declined: {reason}")
            if packed:
                raise ValueError(
                    f"packed rows must not run {self.family.block}'s own forward, which may mix "
                    f"them, and the kernel declined: {reason}"
                )
            return self.original(module, hidden_states, cache, mask, **named)
        B = hidden_states.shape[0]
        if cu_seqlens is not None and B != 1:
            raise ValueError(f"cu_seq_lens_q must come with one packed row, got a batch of {B}")
        call = Call(cu_seqlens, seq_idx, packed)
        if packed and self.family.whole:
            y = self._whole(module, hidden_states, cache, mask, named, call)
        else:
            y = self._run(module, hidden_states, cache, mask, named, call)
        if call.route is None:
            self._count(NOT_REACHED)
        return y

    def _run(self, module, hidden_states, cache, mask, rest: dict, call: Call) -> Tensor:
        view = None if cache is None else CacheView(cache, call)
        outer, self.running.call = self.running.call, call
        try:
            return self.run(module, hidden_states, view, mask, **rest)
        finally:
            self.running.call = outer

    def _whole(self, module, hidden_states, cache, mask, rest: dict, call: Call) -> Tensor:
        """The block over each packed sequence by itself."""
        segments = bounds(call.cu_seqlens, call.seq_idx, hidden_states.shape[1])
        if cache is not None and (
            hidden_states.shape[0] != 1
            or (len(segments) > 1 and cache.has_previous_state(module.layer_idx))
        ):
            raise ValueError(
                f"{self.family.block} must get packed rows without a cache, or one row of them "
                f"with an empty one, got a batch of {hidden_states.shape[0]} with "
                f"{len(segments)} sequences"
            )
        rest = {name: value for name, value in rest.items() if name not in PACKING}
        alone = Call(packed=True)

        def block(hidden_states, cache, mask):
            alone.initial = alone.final = None
            return self._run(module, hidden_states, cache, mask, rest, alone)

        y = run_block(block, hidden_states, mask, segments, cache)
        call.route = alone.route or "nothing but padding"
        return y

    def why_not(self, module: nn.Module, hidden_states: Tensor) -> str | None:
        """Why this call runs the model's own forward, or None."""
        conv = getattr(module, self.family.conv)
        if conv._forward_hooks or conv._forward_pre_hooks:
            return f"{self.family.conv} has forward hooks, which reading its weight would skip"
        return refusal(
            self.kernel.why_not,
            hidden_states.device.type,
            hidden_states.dtype,
            conv.kernel_size[0],
            torch.is_grad_enabled() and differentiates(hidden_states, *module.parameters()),
        )

    def _prefill(self, x, weight, bias=None, activation=None, **kwargs):
        call = self.running.call
        how = "continued prefill" if call.initial is not None else "prefill"
        if call.recording:
            if call.packed:
                raise ValueError("packed rows must not meet a cache that records its past")
            how = "prefill with recorded past"
        self._ran(how)
        if isinstance(x, Joined):
            y, start = [], 0
            for part in x.parts:
                channels = slice(start, start + part.shape[-1])
                y.append(self._convolve(part, weight, bias, activation, channels))
                start = channels.stop
            y = Joined(y, True)
        else:
            y = self._convolve(x.transpose(1, 2), weight, bias, activation, slice(None))
            y = y.transpose(1, 2)
        return y

    def _convolve(self, x, weight, bias, activation, channels: slice) -> Tensor:
        """x [B, T, D] through the taps and the state of its channels."""
        call, taps = self.running.call, self.kernel.layers.taps
        weight, bias = weight[channels], None if bias is None else bias[channels]
        initial = None if call.initial is None else call.initial[:, channels]
        final = None if call.final is None else call.final[:, channels]
        ragged, tracked = call.cu_seqlens is not None, differentiates(x, weight, bias, initial)
        if initial is not None and (ragged or tracked):
            # The backward needs the old state, over which the new one is about to be written.
            initial = self._first_of(initial) if ragged else initial.clone()
        apart = final is not None and (ragged or tracked)
        y = self.kernel.causal_conv1d(
            x,
            taps(weight, x),
            taps(bias, x),
            activation=activation,
            initial_state=initial,
            final_state_out=None if apart else final,
            cu_seqlens=call.cu_seqlens,
            seq_idx=call.seq_idx,
            return_final_state=apart,
            state_len=final.shape[-1] if apart else None,
        )
        if apart:
            y, states = y
            final.copy_(self._last_that_has_rows(states) if ragged else states)
        return y

    def _first_of(self, state: Tensor) -> Tensor:
        """A packed row continues its cache with its first sequence only."""
        states = state.new_zeros(self.running.call.cu_seqlens.shape[0] - 1, *state.shape[1:])
        states[:1] = state
        return states

    def _last_that_has_rows(self, states: Tensor) -> Tensor:
        """The cache goes on with the last sequence; empty ones behind it only pad offsets."""
        lengths = self.running.call.cu_seqlens.diff()
        order = torch.arange(lengths.numel(), device=lengths.device)
        return states.index_select(0, torch.where(lengths > 0, order, 0).amax().view(1))

    def _update(self, x, conv_state, weight, bias=None, activation=None):
        # One token: copying the projections together costs less than two more launches.
        x = x.tensor() if isinstance(x, Joined) else x
        if differentiates(x, conv_state, weight, bias):
            call = self.running.call
            call.initial = call.final = conv_state
            return self._prefill(x, weight, bias, activation)
        self._ran("update")
        taps = self.kernel.layers.taps
        return self.kernel.causal_conv1d_update(
            x, conv_state, taps(weight, x), taps(bias, x), activation
        )

    def _by_sequence(self, rule):
        def delta_rule(*tensors, cu_seqlens=None, seq_idx=None, initial_state=None, **kwargs):
            call = self.running.call
            for name in PACKING:
                kwargs.pop(name, None)
            if not call.packed:
                return rule(*tensors, initial_state=initial_state, **kwargs)
            gates = {name: kwargs.pop(name) for name in ("g", "beta")}
            segments = bounds(call.cu_seqlens, call.seq_idx, tensors[0].shape[1])
            return run_rule(rule, tensors, gates, segments, initial_state, **kwargs)

        return delta_rule

    def _ran(self, how: str) -> None:
        """Counts a block call once, in front of its first launch: where checkpointing recomputes,
        the launch is the last thing that happens."""
        call = self.running.call
        if call.route is None:
            call.route = f"kernel: {'packed ' if call.packed else ''}{how}"
            self._count(call.route)

    def _count(self, route: str) -> None:
        if not torch.compiler.is_compiling():
            with self.counting:
                if (self.family.block, route) not in self.told:
                    self.told.add((self.family.block, route))
                    logger.info("%s: %s", self.family.block, route)
                self.calls[route] += 1
        if self.strict and route.startswith("declined: "):
            raise RuntimeError(f"strict: {self.family.block} did not run the kernel, {route}")

    def report(self, name: str, module: nn.Module) -> LayerReport:
        stands = [getattr(module.__dict__.get(a), "__func__", None) for a in (HOOKED, PLAIN)]
        to = self.kernel.__name__
        if self.entry not in stands:
            to = "declined: displaced, the forward was replaced after patching"
        return LayerReport(name, self.family.name, to, dict(self.calls))


def differentiates(*tensors: Tensor | None) -> bool:
    """Whether gradients are to flow through any of them."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


@torch.compiler.assume_constant_result
def refusal(
    why_not: Callable, device: str, dtype: torch.dtype, W: int, gradients: bool
) -> str | None:
    """The kernel's own reason against calls of this kind, or None."""
    return asked(why_not, device, dtype, W, gradients)


@functools.lru_cache
def asked(why_not: Callable, device: str, dtype: torch.dtype, W: int, gradients: bool):
    # Inside a checkpointed layer the probe's tensors must not count as the layer's.
    own = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.enable_grad(), own:
        x = torch.zeros(1, 1, 1, dtype=dtype, device=device, requires_grad=gradients)
        return why_not("causal_conv1d", x, torch.ones(1, W, dtype=dtype, device=device))


@dataclass
class Declined:
    """A block of a known family that patch() left alone, and why."""

    family: Family
    reason: str

    def report(self, name: str, module: nn.Module) -> LayerReport:
        return LayerReport(name, self.family.name, f"declined: {self.reason}")


class Carrier:
    """A module that is told about packing and does not tell the bound blocks inside it."""

    kept = False

    def __call__(self, module: nn.Module, *args, **kwargs):
        given = {name: kwargs[name] for name in PACKING if kwargs.get(name) is not None}
        if given and any(recomputes(child) for child in module.modules() if child is not module):
            raise ValueError(
                f"packing does not reach the layers that gradient checkpointing recomputes inside "
                f"{type(module).__name__}, got {sorted(given)}"
            )
        inside = [
            binding
            for child in module.modules()
            if isinstance(binding := child.__dict__.get(ATTRIBUTE), Binding)
        ]
        before = [binding.running.carried for binding in inside]
        for binding in inside:
            binding.running.carried = given or binding.running.carried
        try:
            return type(module).forward(module, *args, **kwargs)
        finally:
            for binding, carried in zip(inside, before, strict=True):
                binding.running.carried = carried


def recomputes(module: nn.Module) -> bool:
    return module.training and getattr(module, "gradient_checkpointing", False)


@functools.lru_cache
def bound(original: Callable) -> Callable:
    """A forward with the signature of the class's that runs what the instance is bound to, also in
    a deep copy."""

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        return self.__dict__[ATTRIBUTE](self, *args, **kwargs)

    return forward


def is_ours(attribute: object) -> bool:
    return isinstance(attribute, types.MethodType) and attribute.__func__ is bound(
        type(attribute.__self__).forward
    )
