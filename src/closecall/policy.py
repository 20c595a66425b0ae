"""Policies: a scorer composed with a rule, as immutable values with names, JSON and a readable `str`."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from .registry import Component, unknown
from .rules.base import RULES, Rule
from .scorers.base import SCORERS, Scorer
from .scorers.reductions import AGGREGATES, NORMALISED, SOFTMAX
from .triggers.base import TRIGGERS

JSON_VERSION = 1


C = TypeVar("C", bound=Component)


# Every preset is a composition: the scorer's name (dense needs none) and the rule's.
PRESETS: dict[str, tuple[str | None, str]] = {
    "dense": (None, "dense"),
    "topk": ("mean", "topk"),
    "quest": ("quest", "topk"),
    "router": ("mean", "router"),
    "router-on-quest": ("quest", "router"),
    "auto": ("outliers", "last-tile"),
}

# What a preset has beside the paper's defaults. `auto` is the selector that won our own comparison at equal budget
# (docs/results.md): one key of a block as it is, half of the others' box, in each row a softmax over blocks. Uniform
# top-k, but for the last tile, where most prompts have their question: that keeps twice as many, and the others pay.
GIVEN: dict[str, dict[str, Any]] = {"auto": {"m": 1, "c": 0.5, "aggregate": "softmax", "factor": 2, "give": 0.5}}

# What every preset takes, whether its parts have a use for it or not, so that one sweep can run over all presets.
COMMON = (
    "budget", "tile_factor", "q", "rho", "block", "tile", "pool", "sinks", "trigger", "aggregate", "threshold", "seed",
)  # fmt: skip


class _Overrides(Collection[str]):
    """The names `policy` takes: the common ones, `scorer`, and every parameter of every part that is registered."""

    def __iter__(self) -> Iterator[str]:
        parts = (name for registry in (SCORERS, RULES, TRIGGERS) for name in registry.parameters())
        return iter(dict.fromkeys((*COMMON, "scorer", *parts)))

    def __contains__(self, name: object) -> bool:
        return name in set(self)

    def __len__(self) -> int:
        return len(set(self))


OVERRIDES = _Overrides()


@dataclass(frozen=True)
class Policy:
    """Which blocks a tile of queries may read: a scorer, a rule, and the grid both live on.

    pool: rows per mean. Runs of `pool` rows of a tile are averaged, and the means are scored instead of the rows: at
    1 M tokens scoring every row would cost as much as attending to the blocks it finds. 1 scores every row.
    """

    scorer: Scorer | None
    rule: Rule
    block: int = 64
    tile: int = 64
    sinks: int = 1
    aggregate: str = "max"
    pool: int = 1

    def __post_init__(self) -> None:
        for field, least in (("block", 1), ("tile", 1), ("sinks", 0), ("pool", 1)):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{field} must be a whole number of at least {least}, got {value!r}")
        if self.tile % self.pool:
            raise ValueError(f"pool = {self.pool} must divide the tile of {self.tile} rows")
        aggregates = (*AGGREGATES, *NORMALISED, SOFTMAX)
        if self.aggregate not in aggregates:
            raise unknown("aggregate", self.aggregate, aggregates)
        if self.scorer is None and self.rule.needs_scores:
            raise ValueError(f"rule {self.rule.name!r} needs a scorer: one of {', '.join(SCORERS.names())}")
        if self.scorer is not None:
            _check_scorer(self.scorer)
            self.scorer.check(self)
        self.rule.check(self)

    @property
    def name(self) -> str:
        """The preset this is a variant of, or rule-on-scorer."""
        parts = (self.scorer.name if self.scorer else None, self.rule.name)
        found = self.rule.to_dict() | (self.scorer.to_dict() if self.scorer else {}) | {"aggregate": self.aggregate}
        for name, given in GIVEN.items():
            if PRESETS[name] == parts and given.items() <= found.items():
                return name
        return composed(*parts)

    @property
    def most_forced(self) -> int:
        """The most blocks any tile can be forced to keep: the sinks, and its own blocks when off the block grid."""
        return self.sinks + (self.tile + self.block - 2) // self.block + 1

    def no_room(self, forced: int, which: str) -> ValueError:
        """The error for a tile budget that leaves no room beside as many forced blocks."""
        return ValueError(
            f"tile budget {self.rule.tile_budget} must exceed the {forced} {which} ({self.sinks} sink, the rest its "
            f"own): {self.rule.remedy(forced + 1)}"
        )

    def replace(self, **fields: Any) -> Policy:
        return dataclasses.replace(self, **fields)

    def for_layer(self, index: int) -> Policy:
        """The policy of one layer of a model: itself, unless a part of its rule was fitted layer by layer."""
        rule = self.rule.for_layer(index)
        return self if rule is self.rule else self.replace(rule=rule)

    def to_json(self) -> str:
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.pool == 1:  # as before there was a pool, so that what was stored under a policy's JSON is still found
            del data["pool"]
        parts = {k: v.to_dict() if isinstance(v, Component) else v for k, v in data.items()}
        return json.dumps({"closecall_policy": JSON_VERSION} | parts)

    @classmethod
    def from_json(cls, text: str) -> Policy:
        data = json.loads(text)
        version = data.pop("closecall_policy", None) if isinstance(data, dict) else None
        if version != JSON_VERSION:
            raise ValueError(f"not a policy of JSON version {JSON_VERSION}: closecall_policy is {version!r}")
        scorer, rule = data.pop("scorer", None), data.pop("rule", None)
        known = {f.name for f in dataclasses.fields(cls)} - {"scorer", "rule"}
        for key in data:
            if key not in known:
                raise unknown("policy field", key, known)
        return cls(scorer=SCORERS.from_dict(scorer) if scorer else None, rule=RULES.from_dict(rule), **data)

    def __str__(self) -> str:
        if self.scorer is None:
            return f"{self.name}: {self.rule.describe()}"
        rows = f"means of {self.pool} rows of " if self.pool > 1 else ""
        return (
            f"{self.name}: {self.scorer.describe()}, {self.aggregate} over {rows}{self.tile}-row tiles; "
            f"{self.rule.describe()}; blocks of {self.block} keys, {self.sinks} sink"
        )


def composed(scorer: str | None, rule: str) -> str:
    """What a rule on a scorer with nothing else given is called: a preset's name, or RULE-on-SCORER."""
    plain = (n for n, parts in PRESETS.items() if parts == (scorer, rule) and n not in GIVEN)
    return next(plain, f"{rule}-on-{scorer}")


def parts_of(name: str) -> tuple[str | None, str]:
    """The names of the scorer (None: it needs none) and the rule of a preset, or of any `RULE-on-SCORER`."""
    if name in PRESETS:
        return PRESETS[name]
    rule, on, scorer = name.partition("-on-")
    if not on:
        raise unknown("policy", name, PRESETS)
    if rule not in RULES.names() or scorer not in SCORERS.names():
        every = [*PRESETS, *(f"{r}-on-{s}" for r in RULES.names() for s in SCORERS.names())]
        near = difflib.get_close_matches(name, every, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"unknown policy {name!r}: {hint}known: {', '.join(sorted(PRESETS))}, and RULE-on-SCORER of the rules "
            f"{', '.join(RULES.names())} and the scorers {', '.join(SCORERS.names())}"
        )
    return scorer, rule


def _check_scorer(given: object) -> None:
    if not isinstance(given, Scorer):
        raise TypeError(f"scorer must be a Scorer or one of {', '.join(SCORERS.names())}, got {given!r}")


def _scorer(given: Scorer | str, overrides: dict[str, Any]) -> Scorer:
    """The scorer of that name, or the one that was handed over, with those of the overrides that it takes."""
    if isinstance(given, str):
        return SCORERS.make(given, overrides)
    _check_scorer(given)
    taken = {f.name: overrides[f.name] for f in dataclasses.fields(given) if f.name in overrides}
    return dataclasses.replace(given, **taken)


def _check_used(made: Policy, overrides: Iterable[str]) -> None:
    """Parameters of parts that the policy is not made of are mistakes."""
    taken = made.rule.parameters() | (made.scorer.parameters() if made.scorer else set())
    for key in overrides:
        if key in taken or key in COMMON or key == "scorer":
            continue
        owners = [f"{r.kind} {name!r}" for r in (SCORERS, RULES) for name in r.parameters().get(key, [])]
        parts = f"rule {made.rule.name!r}" + (f" on scorer {made.scorer.name!r}" if made.scorer else "")
        hint = f": it belongs to {', '.join(owners)}" if owners else ""
        raise ValueError(f"{key}= has no effect on {parts}{hint}")


def policy(name: str, **overrides: Any) -> Policy:
    """A preset with overrides.

    Presets: `dense`, `topk`, `quest`, `router`, `router-on-quest`, and `auto`, our own best; any other composition is
    called `RULE-on-SCORER`, such as `topk-on-box`.
    Overrides and the paper's defaults: `budget=33, tile_factor=2, q=0.4, rho=2, block=64, tile=64, sinks=1,
    trigger="quantile", aggregate="max", pool=1`; `threshold=` goes with `trigger="absolute"`, `seed=` with
    `trigger="random"`. Every preset takes these, so that one sweep can run over all of them; a preset uses those its
    parts have (`dense` has no budget). `scorer=` puts another scorer in the preset's place, and the parameters of the
    scorer and the rule that a policy is made of are overrides too.

    >>> print(policy("router-on-quest", budget=33).rule.tile_budget)
    66
    >>> print(policy("topk", scorer="box", c=0.25).name)
    topk-on-box
    """
    scorer_name, rule_name = parts_of(name)
    known = set(OVERRIDES)
    for key in overrides:
        if key not in known:
            raise unknown("policy override", key, known)
    given = GIVEN.get(name, {}) | overrides
    grid = {key: given[key] for key in ("block", "tile", "sinks", "aggregate", "pool") if key in given}
    if scorer_name is None:
        if "scorer" in overrides:
            raise ValueError(f"policy {name!r} ranks nothing and has no scorer: leave scorer= out")
        grid = {key: grid[key] for key in ("block", "tile") if key in grid}
    made = Policy(
        scorer=_scorer(given.get("scorer", scorer_name), given) if scorer_name else None,
        rule=RULES[rule_name].from_overrides(given),
        **grid,
    )
    _check_used(made, overrides)
    return made


def as_policy(value: Policy | str) -> Policy:
    """A policy, or the preset of that name."""
    if isinstance(value, Policy):
        return value
    if isinstance(value, str):
        return policy(value)
    raise TypeError(f"policy must be a closecall.Policy or a preset's name, got {type(value).__name__}")
