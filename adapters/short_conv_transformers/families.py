"""The model families whose blocks the adapter knows. Data only."""

from __future__ import annotations

from .spec import Family


def _modeling(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


FAMILIES = (
    Family("qwen3_5", _modeling("qwen3_5"), "Qwen3_5GatedDeltaNet"),
    Family("qwen3_5_moe", _modeling("qwen3_5_moe"), "Qwen3_5MoeGatedDeltaNet"),
    Family("qwen3_next", _modeling("qwen3_next"), "Qwen3NextGatedDeltaNet"),
)

BY_BLOCK = {family.key: family for family in FAMILIES}
if len(BY_BLOCK) != len(FAMILIES):
    raise ValueError("two families name the same block")
