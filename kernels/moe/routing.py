"""How tokens get their experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """`groups`: experts come in so many groups of neighbours, and only those of the `top_groups` best
    can be chosen; a group is as good as its best expert, or as its two best together where there is a
    bias.
    `renormalize`: the chosen weights sum up to 1, then `scale`. `shared`: so many experts more, behind
    the others, that no router asks about and every token has, with weight 1.

    `forced_even`: for measuring weights of noise, whose favourites would be loaded as no trained model's
    are: token t of a step gets experts t k, t k + 1, ... (mod the number of experts), whatever it wants.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    has_bias: bool = False
    shared: int = 0
    forced_even: bool = False

    @property
    def each(self) -> int:
        """Experts of a token."""
        return self.top_k + self.shared
