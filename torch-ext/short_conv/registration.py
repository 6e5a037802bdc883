"""Fakes of the ops: the contract on what a fake tensor knows, and no result but the writes."""

from __future__ import annotations

import torch

from . import contract
from ._ops import add_op_namespace_prefix

for _name, _rules in {
    "fwd": contract.fwd,
    "update": contract.update,
    "states": contract.states,
}.items():
    torch.library.register_fake(add_op_namespace_prefix(_name), _rules)
