"""Causal depthwise 1-d convolutions with state: the short-conv blocks of hybrid language models."""

from . import layers, reference, registration  # noqa: F401  (oracle for tests; effects only)
from .checking import checking
from .ops import (
    causal_conv1d,
    causal_conv1d_fn,
    causal_conv1d_update,
    causal_conv1d_varlen_states,
)
from .support import why_not

__all__ = [
    "causal_conv1d",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "causal_conv1d_varlen_states",
    "checking",
    "layers",
    "why_not",
]
