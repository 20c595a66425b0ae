"""Rules: from a tile's ranked blocks to how many it keeps.

Every rule keeps the forced blocks and a prefix of the ranking, so a rule only has to say how long the prefix is.
That is why any rule runs on any scorer and any backend: backends rank, rules count, kernels read the kept blocks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ..ranking import Decision, Ranked
from ..registry import Component, Registry, Setting, must_define
from ..triggers.base import Trigger

RULES: Registry[Rule] = Registry("rule")


class Heads(NamedTuple):
    """The query heads of a model's layers. `dim` is 0 where nobody noted it."""

    number: int
    dim: int = 0

    def differs(self, other: Heads) -> bool:
        return self.number != other.number or (0 not in (self.dim, other.dim) and self.dim != other.dim)

    def __str__(self) -> str:
        return f"{self.number} query heads" + (f" of dimension {self.dim}" if self.dim else "")


@dataclass(frozen=True)
class Rule(Component):
    """Turns rankings into kept counts. A subclass defines `limit`, `decide` and `describe`."""

    # Whether tile scores decide anything. A rule without keeps every visible block and its policy needs no scorer.
    needs_scores: ClassVar[bool] = True

    @property
    def tile_budget(self) -> int | None:
        """Blocks that a tile keeps, forced ones included, unless the rule expands it; None where no number says that.

        A tile that sees no more than this keeps all, and it must exceed the forced blocks of every tile.
        """
        return None

    @property
    def tile_factor(self) -> float | None:
        """The tile budget over the budget that the user set; None where the rule has no `budget`."""
        return None

    @property
    def at_ranks(self) -> bool:
        """Whether it asks a ranking for nothing but the scores at some ranks (`Ranked.at`): a backend then need not
        sort the blocks."""
        return False

    @property
    def reads_back(self) -> bool:
        """Whether deciding reads numbers back from the device, which no CUDA graph can hold."""
        return False

    def remedy(self, tile_budget: int) -> str:
        """Says how to get a tile budget of at least `tile_budget`, as the end of an error message."""
        return f"give rule {self.name!r} a tile budget of {tile_budget} or more"

    @classmethod
    def from_overrides(cls, overrides: dict[str, Any]) -> Rule:
        """Makes the rule from the overrides that have an effect on it."""
        return RULES.make(cls.name, overrides)

    def check(self, policy: Setting) -> None:
        """Called when a policy is made with this rule; warns or raises if the two cannot work together."""

    def limit(self, n_blocks: int) -> int:
        """The most blocks any tile may keep, forced ones included: how far backends must rank."""
        raise must_define(self, "limit(self, n_blocks)", "the most blocks that a tile may keep, forced ones included")

    def every_row(self, sequence: Tensor) -> Tensor | None:
        """bool `[B, T]`: tiles whose rows are scored one by one, however many the policy pools; None means none."""
        return None

    def limits(self, sequence: Tensor, n_blocks: int) -> Tensor | None:
        """`[B, T]`: how far each tile must be ranked, where that differs; a backend may rank further, up to `limit`."""
        return None

    def decide(self, ranked: Ranked) -> Decision:
        """Decides how many blocks each tile keeps, forced ones included."""
        raise must_define(
            self, "decide(self, ranked)", "a closecall.Decision with the number of blocks each tile keeps"
        )

    def _parts(self) -> dict[str, Rule | Trigger]:
        """The triggers and rules it is made of, by field."""
        fields = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: part for name, part in fields if isinstance(part, (Rule, Trigger))}

    def for_layer(self, index: int) -> Rule:
        """The rule of one layer of a model: itself, unless a part of it was fitted layer by layer."""
        parts = self._parts()
        there = {name: part.for_layer(index) for name, part in parts.items()}
        return dataclasses.replace(self, **there) if any(there[name] is not parts[name] for name in parts) else self

    def times(self, factor: float, least: int) -> Rule:
        """The rule with `factor` times the blocks wherever a part of it has budgets by head, and no fewer than `least`;
        itself where none has."""
        parts = {name: part for name, part in self._parts().items() if isinstance(part, Rule)}
        there = {name: part.times(factor, least) for name, part in parts.items()}
        return dataclasses.replace(self, **there) if any(there[name] is not parts[name] for name in parts) else self

    def made_for(self) -> tuple[int, ...] | None:
        """The layers that a part of it was fitted to; None where it suits every layer of every model."""
        return next((layers for part in self._parts().values() if (layers := part.made_for()) is not None), None)

    def heads(self) -> Heads | None:
        """The query heads of the layers that a part of it was fitted to; None where it suits every model."""
        rules = (part for part in self._parts().values() if isinstance(part, Rule))
        return next((heads for part in rules if (heads := part.heads()) is not None), None)

    def has_trigger(self) -> bool:
        """Whether a trigger picks tiles for it: only then a rate of triggered tiles says something."""
        return any(isinstance(part, Trigger) or part.has_trigger() for part in self._parts().values())

    def describe(self) -> str:
        """Describes the rule in a phrase, for the policy's one-line description."""
        return f"rule {self.name!r}"
