"""A grid of runs: models x tasks x contexts x policies x budgets, and the jobs it is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from .kinds import parse
from .spec import Spec
from .store import Kept


@dataclass(frozen=True)
class Grid:
    """All that one `closecall eval` runs. Every policy sees the same examples."""

    models: tuple[str, ...]
    tasks: tuple[str, ...]
    contexts: tuple[int, ...]
    specs: tuple[Spec, ...]
    budgets: tuple[int, ...]
    n: int
    seed: int = 0
    dtype: str | None = None

    def __post_init__(self) -> None:
        # Every task by the name that it writes itself. Unknown ones are found before a model is loaded.
        kinds = [parse(task) for task in self.tasks]
        for kind in kinds:
            kind.check()
        object.__setattr__(self, "tasks", tuple(dict.fromkeys(map(str, kinds))))
        for name in ("models", "tasks", "contexts", "specs", "budgets"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: name at least one")
        for name, least in (("n", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        for context in self.contexts:
            if context < 1:
                raise ValueError(f"a context is a number of tokens, at least 1, got {context!r}")
        for spec, budget in self.variants:
            made = spec.policy(budget)
            kept = made.rule.tile_budget
            if kept is not None and kept <= made.most_forced:
                raise ValueError(
                    f"{spec} at budget {budget} keeps {kept} blocks a tile, not more than the "
                    f"{made.most_forced} it can be forced to keep: use a larger budget"
                )

    @cached_property
    def variants(self) -> list[tuple[Spec, int]]:
        """Every policy at every budget, routers before their matched controls, and dense once, with budget 0."""
        listed = [(spec, budget) for spec in self.specs for budget in (self.budgets if spec.has_budget else (0,))]
        listed += [(spec.base, budget) for spec, budget in listed if spec.control == "matched"]
        return sorted(dict.fromkeys(listed), key=lambda v: v[0].control == "matched")

    @property
    def notes(self) -> list[str]:
        found = (note for spec, budget in self.variants if spec.has_budget for note in spec.notes(budget))
        return list(dict.fromkeys(found))

    @cached_property
    def places(self) -> list[tuple[str, int]]:
        """Every task at every context; those whose examples have their own lengths once, at 0."""
        own = [task for task in self.tasks if parse(task).own_lengths]
        ours = [(task, context) for context in self.contexts for task in self.tasks if task not in own]
        return ours + [(task, 0) for task in own]

    def jobs(self) -> list[Job]:
        """Example by example, so that a run stopped anywhere has every cell filled about equally."""
        return [
            Job(task, context, self.seed, number, tuple(self.variants))
            for number in range(self.n)
            for task, context in self.places
        ]


@dataclass(frozen=True)
class Job:
    """One example of one model under all policies. `known` are the runs there are, so that only others are made."""

    task: str
    context: int
    seed: int
    number: int
    variants: tuple[tuple[Spec, int], ...]
    known: dict[str, Kept] = field(default_factory=dict, hash=False)
