"""Projections that stand for their concatenation, against the concatenation."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.22")
from short_conv_transformers.joined import Joined, Torch  # noqa: E402


@pytest.fixture
def parts():
    return [torch.randn(2, 5, D) for D in (3, 4, 6)]


def test_behaves_as_the_concatenation(parts):
    joined, whole = Torch.cat(parts, dim=-1), torch.cat(parts, dim=-1)
    assert isinstance(joined, Joined) and torch.equal(joined.tensor(), whole)
    turned = joined.transpose(1, 2)
    assert torch.equal(turned.tensor(), whole.transpose(1, 2))
    assert turned.shape == whole.transpose(1, 2).shape and joined.shape == whole.shape
    assert (turned.dtype, turned.device) == (whole.dtype, whole.device)
    last = turned[:, :, -2:]
    assert torch.equal(last.tensor(), whole.transpose(1, 2)[:, :, -2:])
    for a, b in zip(Torch.split(joined, [3, 4, 6], dim=-1), parts, strict=True):
        assert a is b


def test_everything_else_is_torch(parts):
    assert Torch().float32 is torch.float32 and Torch().sigmoid is torch.sigmoid
    rows = Torch.cat(parts[:1] * 2, dim=0)
    assert torch.equal(rows, torch.cat(parts[:1] * 2, dim=0))
    assert [t.shape[-1] for t in Torch.split(parts[2], [2, 4], dim=-1)] == [2, 4]


def test_refuses_what_it_does_not_stand_for(parts):
    joined = Joined(parts)
    with pytest.raises(ValueError, match="split must give the joined parts back"):
        Torch.split(joined, [4, 3, 6], dim=-1)
    with pytest.raises(ValueError, match="split must give"):
        Torch.split(joined.transpose(1, 2), [3, 4, 6], dim=-1)
    with pytest.raises(ValueError, match="swap time and channels"):
        joined.transpose(0, 1)
    for index in ((slice(None), slice(0, 2), slice(None)), (0, slice(None), slice(None))):
        with pytest.raises(ValueError, match="index must select times"):
            joined.transpose(1, 2)[index]
