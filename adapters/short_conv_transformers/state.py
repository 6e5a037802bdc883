"""Where one call's conv state comes from and goes to: the model's own cache, in place."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .joined import Joined


@dataclass
class Call:
    """One forward of one block."""

    cu_seqlens: Tensor | None = None
    seq_idx: Tensor | None = None
    packed: bool = False
    initial: Tensor | None = None
    final: Tensor | None = None
    recording: bool = False
    route: str | None = None  # which kernel the convolution ran, once it has


class CacheView:
    """A model's cache, except that a block's new inputs are not copied into or behind its state:
    the kernel reads and writes the state in place."""

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
            if isinstance(conv_states, Joined):
                conv_states = conv_states.tensor()
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
