"""What the adapter knows of a model family, and nothing it does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One block class whose forward convolves through the two function kernels.

    Attributes:
        name: transformers' model type.
        modeling: module that defines the block.
        block: class name of the block.
        parameters: the block forward's signature, checked before anything is replaced.
        conv: attribute of the block that holds the depthwise nn.Conv1d.
        fn, update: names of the prefill and decode functions in the modeling module.
        chunk_rules: delta-rule functions that must run segment by segment on packed rows.
    """

    name: str
    modeling: str
    block: str
    parameters: tuple[str, ...] = (
        "self",
        "hidden_states",
        "cache_params",
        "attention_mask",
        "kwargs",
    )
    conv: str = "conv1d"
    fn: str = "causal_conv1d_fn"
    update: str = "causal_conv1d_update"
    chunk_rules: tuple[str, ...] = ("torch_chunk_gated_delta_rule",)

    def __post_init__(self):
        if not self.modeling.startswith("transformers.models."):
            raise ValueError(
                f"modeling must be a transformers.models module, got {self.modeling!r}"
            )

    @property
    def key(self) -> tuple[str, str]:
        return self.modeling, self.block
