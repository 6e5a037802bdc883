"""short-conv kernels inside transformers models: patch a loaded model, see what ran, undo it."""

from .apply import Handle, patch, unpatch
from .hub import mapping
from .loader import load_kernel
from .report import ModelReport, report

__all__ = ["Handle", "ModelReport", "load_kernel", "mapping", "patch", "report", "unpatch"]
