"""Fakes of the ops: the contract on what a fake tensor knows, and no result but the writes."""

from __future__ import annotations

import torch

from .calls import RULES

for _op, _rules in RULES.items():
    torch.library.register_fake(_op, _rules)
