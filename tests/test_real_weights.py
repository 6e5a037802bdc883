"""Trained weights: a 6-layer Mamba text segmenter labels its texts identically with our conv.

The package `typeseg` carries weights and a NumPy reference. Its convolutions are padded on both
sides (1 left, 2 right): that is ours on inputs padded by 2 on the right, minus the first 2 rows.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

SPEC = importlib.util.find_spec("typeseg")
pytestmark = pytest.mark.skipif(SPEC is None, reason="typeseg is not installed (make test does)")

TEXTS = [
    '{"name": "short-conv", "width": 4}\n<html><body><p>Hello</p></body></html>\n',
    "SELECT id, name FROM users WHERE age > 30;\nPlain English text follows here.\n",
    "def f(x):\n    return x + 1\n\n# Title\n\nSome *markdown* text.\n{\"a\": [1, 2, 3]}\n",
]


@pytest.fixture(scope="module")
def typeseg():
    """The package's NumPy modules without its __init__, which wants onnxruntime."""
    root = Path(SPEC.submodule_search_locations[0])
    package = types.ModuleType("typeseg")
    package.__path__ = [str(root)]
    saved = sys.modules.get("typeseg")
    sys.modules["typeseg"] = package
    yield package, root
    if saved is not None:
        sys.modules["typeseg"] = saved
