"""Settings of a mixture of experts: how it chooses and gates its experts; plain values that every path shares."""

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen"]


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule from the router's logits to the chosen experts and their weights."""

    top_k: int
    scoring: Scoring = "softmax"
    """Over all experts, each expert by itself, or over the logits of those that were chosen."""
    renormalize: bool = False
    """Divide the chosen weights by their sum."""
    scale: float = 1.0
    """Factor on the weights, after all else."""
    groups: int = 1
    """Experts are chosen from the best `top_groups` of this many equal groups (DeepSeek-V2, section 2.1.3)."""
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    """A group's score: that of its best expert, or the sum of its two best."""


@dataclass(frozen=True, slots=True)
class Swiglu:
    """The gate between an expert's two products.

    `activation(gate) * up` without a limit. With one, as gpt-oss has it: gate = min(gate, limit), up = clamp(up,
    -limit, limit), and the result is gate * sigmoid(alpha * gate) * (up + 1).
    """

    alpha: float = 1.0
    limit: float | None = None
    activation: Activation = "silu"
    """As of `kernels.linear.GATES`."""

    @property
    def kind(self) -> Literal["silu", "gelu_tanh", "clamped"]:
        return self.activation if self.limit is None else "clamped"


SILU = Swiglu()
