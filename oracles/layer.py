"""The GDN layer of Qwen3-Next: its widths.

    in_proj -> [q k v | z | b a]; conv1d and silu on q, k, v; L2 norm on q, k; gates of a, b; gated delta rule;
    gated RMSNorm with z; out_proj
"""

import dataclasses
import itertools


@dataclasses.dataclass(frozen=True)
class Layer:
    """The widths of one layer. ValueError for a width under 1, or value heads that are no multiple of the key heads."""

    hidden: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            width = getattr(self, field.name)
            if not isinstance(width, int) or isinstance(width, bool) or width < 1:
                raise ValueError(f"{field.name} must be a whole number from 1 up, got {width!r}")
        if self.value_heads % self.heads:
            raise ValueError(f"value_heads must be a multiple of heads {self.heads}, got {self.value_heads}")

    @property
    def sections(self) -> dict[str, int]:
        """The widths of the sections of in_proj's output, in their order: q, k, v, z, b, a."""
        keys, values = self.heads * self.key_dim, self.value_heads * self.value_dim
        return {"q": keys, "k": keys, "v": values, "z": values, "b": self.value_heads, "a": self.value_heads}

    def offsets(self) -> dict[str, int]:
        """Where each section begins in in_proj's output."""
        ends = itertools.accumulate(self.sections.values())
        return {name: end - width for (name, width), end in zip(self.sections.items(), ends, strict=True)}
