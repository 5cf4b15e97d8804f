"""What makes a soft-token compressor: windows, ratios, pooling, adapter, and the three markers."""

from __future__ import annotations

from dataclasses import dataclass

POOLINGS = ("mean", "concat", "eos")
ADAPTERS = ("mlp", "attn_mlp", "mlp_attn")


@dataclass(frozen=True)
class SoftConfig:
    """The settings of an encoder–decoder compressor (LCLM, arXiv 2606.09659).

    Attributes:
      memory_start, memory, memory_end: ids of the three markers in the decoder's vocabulary.
      ratios: N, the tokens that become one soft token; several where one model serves several.
        The first is used where a region names none.
      window: W, tokens that the encoder sees at once; positions restart in each window.
      overlap: O, tokens to the left (and to the right, if not causal) of a window that the encoder
        sees too but that are not pooled.
      pooling: `"mean"` of the block's states, `"concat"` of them, or `"eos"`: the states of ids
        appended behind the window, one a block.
      causal: whether an encoder token sees only what stands before it.
      adapter: `"mlp"`, or with an attention layer over a region's soft tokens before it
        (`"attn_mlp"`) or behind it (`"mlp_attn"`).
      eos_id: the encoder id that `"eos"` pooling appends.
    """

    memory_start: int
    memory: int
    memory_end: int
    ratios: tuple[int, ...] = (16,)
    window: int = 1024
    overlap: int = 0
    pooling: str = "mean"
    causal: bool = True
    adapter: str = "mlp"
    eos_id: int = 0

    def __post_init__(self) -> None:
        for name, known in (("pooling", POOLINGS), ("adapter", ADAPTERS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"soft.{name} is {getattr(self, name)!r}; use one of {', '.join(known)}"
                )
        numbers = (self.window, self.overlap, self.eos_id, self.memory_start, self.memory,
                   self.memory_end, *self.ratios)  # fmt: skip
        if not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError(f"soft: {numbers} must be whole numbers, 0 or more")
        if not self.ratios or min(self.ratios) < 1:
            raise ValueError(f"soft.ratios is {self.ratios}; give at least one, each 1 or more")
        for ratio in self.ratios:
            if self.window < 1 or self.window % ratio:
                raise ValueError(
                    f"soft.window is {self.window}; use a multiple of the ratio {ratio}"
                )
        if self.pooling == "concat" and len(set(self.ratios)) > 1:
            raise ValueError(
                f"soft.ratios is {self.ratios} with concat pooling, whose adapter fits one ratio; "
                "give one, or pool by mean"
            )
        if len({self.memory_start, self.memory, self.memory_end}) < 3:
            raise ValueError("soft: memory_start, memory and memory_end must be three ids")

    @property
    def slots(self) -> int:
        """M, the most soft tokens that a window yields."""
        return self.window // min(self.ratios)

    @property
    def width(self) -> int:
        """Encoder tokens of a window with its overlap and what is appended to it."""
        sides = 1 if self.causal else 2
        return self.window + sides * self.overlap + (self.slots if self.pooling == "eos" else 0)

    def latent_size(self, hidden_size: int) -> int:
        """Elements of a pooled latent, given the encoder's hidden size."""
        return hidden_size * (self.ratios[0] if self.pooling == "concat" else 1)

    def count(self, tokens: int, ratio: int | None = None) -> int:
        """Soft tokens that a region of so many tokens becomes: ⌈tokens / N⌉."""
        return -(-tokens // self.checked_ratio(ratio))

    def checked_ratio(self, ratio: int | None) -> int:
        """`ratio`, or the default for None; ValueError where the model does not serve it."""
        if ratio is not None and ratio not in self.ratios:
            raise ValueError(f"ratio is {ratio}; this model compresses by {self.ratios}")
        return self.ratios[0] if ratio is None else ratio
