"""Trained weights: a 6-layer Mamba text segmenter labels its texts identically with our conv.

The package `typeseg` carries weights and a NumPy reference. Its convolutions are padded on both
sides (1 left, 2 right): that is ours on inputs padded by 2 on the right, minus the first 2 rows.
"""

from __future__ import annotations

import importlib
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
    'def f(x):\n    return x + 1\n\n# Title\n\nSome *markdown* text.\n{"a": [1, 2, 3]}\n',
]


@pytest.fixture(scope="module")
def mamba():
    """The NumPy model (module, weights), loaded past the package's __init__, which wants
    onnxruntime."""
    root = Path(SPEC.submodule_search_locations[0])
    package = types.ModuleType("typeseg")
    package.__path__ = [str(root)]
    sys.modules["typeseg"] = package
    try:
        model = importlib.import_module("typeseg._mamba_kernel")
        backend = importlib.import_module("typeseg._numpy_backend")
    finally:
        del sys.modules["typeseg"]
    arrays = np.load(root / "data" / "mamba_al.npz")
    return model, backend.Weights({name.replace("__", "/"): arrays[name] for name in arrays})


def logits(mamba, text: str) -> np.ndarray:
    model, weights = mamba
    tokens = np.frombuffer(text.encode(), dtype=np.uint8)
    return model.mamba_forward(
        np, weights, tokens, n_layers=6, d_state=16, dt_rank=16, d_conv=4, parallel=False
    )


def test_labels_are_identical(kernel, device, mamba, monkeypatch):
    model, _ = mamba
    expected = [logits(mamba, text) for text in TEXTS]
    calls = []

    def ours(xp, x, taps, bias):
        rows = torch.from_numpy(np.pad(x, ((0, 2), (0, 0)))).to(device)[None]
        weight = torch.from_numpy(taps[:, 0].T.copy()).to(device)
        y = kernel.causal_conv1d(rows.float(), weight, torch.from_numpy(bias).to(device))
        calls.append(x.shape)
        return y[0, 2:].cpu().numpy()

    monkeypatch.setattr(model, "_depthwise_conv1d_same", ours)
    labels = set()
    for text, theirs in zip(TEXTS, expected, strict=False):
        got = logits(mamba, text)
        assert (got.argmax(-1) == theirs.argmax(-1)).all()
        assert np.abs(got - theirs).max() < 1e-3
        labels |= set(theirs.argmax(-1).tolist())
    assert len(calls) == 6 * len(TEXTS)
    assert len(labels) > 3  # the texts do hold several kinds
