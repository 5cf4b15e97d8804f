"""How a layer turns positions into rotation angles."""

import math
from dataclasses import dataclass

import numpy as np

from kvjax.models.config_values import show


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: Su et al. 2021 (arXiv:2104.09864); yarn: Peng et al. 2023 (2309.00071)."""

    theta: float = 10000.0
    kind: str = "default"  # "default" | "linear" | "llama3" | "yarn"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0  # llama3, yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if not self.theta > 1:
            raise ValueError(f"rope_theta: {self.theta} must be above 1")
        known = ("default", "linear", "llama3", "yarn")
        if self.kind not in known:
            raise ValueError(f"rope_type: {show(self.kind)} is none of {', '.join(known)}")
        if self.kind in ("llama3", "yarn") and self.original_context < 1:
            raise ValueError(
                f"original_max_position_embeddings: {self.original_context} for rope_type"
                f" {self.kind}; set it to the length the model was first trained on"
            )
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor: {self.high_freq_factor} must be above low_freq_factor"
                f" ({self.low_freq_factor})"
            )

    def inverse_frequencies(self, dim: int) -> tuple[np.ndarray, float]:
        """Angle per position of a head of `dim`: [dim/2] float32, and the factor on cos and sin."""
        plain = self.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
        if self.kind == "linear":
            plain = plain / self.factor
        elif self.kind == "llama3":
            plain = self._llama3(plain)
        elif self.kind == "yarn":
            return self._yarn(plain, dim).astype(np.float32), self._yarn_attention_factor()
        return plain.astype(np.float32), 1.0

    def _llama3(self, plain: np.ndarray) -> np.ndarray:
        # Turns within the original context: few are divided by the factor, many are left alone.
        turns = self.original_context * plain / (2 * math.pi)
        span = self.high_freq_factor - self.low_freq_factor
        keep = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
        return plain * (keep + (1 - keep) / self.factor)

    def _yarn(self, plain: np.ndarray, dim: int) -> np.ndarray:
        def channel(turns: float) -> float:  # the channel pair that makes this many turns
            length = self.original_context / (turns * 2 * math.pi)
            return dim * math.log(length) / (2 * math.log(self.theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        divide = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
        return plain * ((1 - divide) + divide / self.factor)

    def _yarn_attention_factor(self) -> float:
        def magnitude(mscale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return magnitude(self.mscale) / magnitude(self.mscale_all_dim)
        return magnitude(1.0)
