"""What the adapter knows of a model family, and nothing it does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One block class whose forward convolves through the two function kernels.

    Attributes:
        name: transformers' model type.
        block: class name of the block.
        cache, mask: the block's names for its cache and its padding mask; with the first and the
            last parameter they are the signature that is checked before anything is replaced.
        conv: attribute of the block that holds the depthwise nn.Conv1d.
        hooked: further children whose weights the block reads without calling them.
        rules: functions behind the convolution that mix tokens and must run one sequence at a time
            on packed rows. Without any, `whole` decides.
        whole: on packed rows the whole block runs one sequence at a time, since what follows the
            convolution mixes tokens and has no common shape.
        joined: the block concatenates its projections in front of the convolution and splits them
            behind it.
        carriers: classes of the modules around the block that are told about packing and do not
            tell the block.
    """

    name: str
    block: str
    cache: str = "cache_params"
    mask: str = "attention_mask"
    conv: str = "conv1d"
    hooked: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    whole: bool = False
    joined: bool = False
    carriers: tuple[str, ...] = ()

    def __post_init__(self):
        if self.rules and self.whole:
            raise ValueError(f"rules must be empty when whole is set, got {self.rules}")

    @property
    def modeling(self) -> str:
        """The module that defines the block."""
        return f"transformers.models.{self.name}.modeling_{self.name}"

    @property
    def key(self) -> tuple[str, str]:
        return self.modeling, self.block

    @property
    def parameters(self) -> tuple[str, ...]:
        return "self", "hidden_states", self.cache, self.mask, "kwargs"
