"""Policies: a scorer composed with a rule, as immutable values with names, JSON and a readable `str`."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .checks import MOST, is_number, is_whole
from .geometry import Geometry
from .overrides import read as read_overrides
from .presets import GIVEN, PRESETS, WITH_POOL, composed, parts_of
from .registry import Component, Registry, unknown
from .rules.base import RULES, Rule
from .scorers.base import SCORERS, Scorer
from .scorers.reductions import REDUCTIONS, Reduction
from .triggers.base import TRIGGERS, Trigger
from .tuned import tuned_path

JSON_VERSION = 1

# The parameters of a policy itself, beside those of its scorer and its rule. Without a scorer only the grid is left.
GRID = ("block", "tile")
NEED_A_POOL = ("outlying", "unpooled", "candidates")  # which have no effect where every row is scored
OWN = (*GRID, "sinks", "aggregate", "pool", *NEED_A_POOL, "share", "scorer")
SHARES = ("head", "group")
FILE = "file:"  # in front of the path of a saved policy
TUNED = "tuned:"  # in front of the name of a model that we ran `closecall tune` on
TIMES = ":times="  # behind either: every head's budget is multiplied, for longer or shorter prompts


@dataclass(frozen=True)
class Policy:
    """Which blocks a tile of queries may read: a scorer, a rule, and the grid both live on.

    pool: rows per mean. Runs of `pool` rows of a tile are averaged, and the means are scored instead of the rows: at
    1 M tokens scoring every row would cost as much as attending to the blocks it finds. 1 scores every row.

    outlying: how many rows of a tile are scored in addition to the means: those most distant from the mean of all its
    rows, as the scorer `outliers` does with keys. A row that looks for one thing would drown in a mean.

    unpooled: in how many last tiles of a prompt every row is scored, in addition to the tiles that the rule protects.
    Their cost grows with the prompt as attention's does, so long prompts can afford them.

    candidates: the best `candidates * tile budget` blocks of a tile, by means and outlying rows, are scored again by
    every row, and no others are kept. 0: the means and outlying rows decide. Without a pool all three are 0.

    share: which heads decide together. `"head"`: every query head keeps its own blocks. `"group"`: the query heads that
    read one KV head keep the same blocks, those that any of them wants most, so kernels load keys and values once.
    """

    scorer: Scorer | None
    rule: Rule
    block: int = 64
    tile: int = 64
    sinks: int = 1
    aggregate: str = "max"
    pool: int = 1
    share: str = "head"
    outlying: int = 0
    unpooled: int = 0
    candidates: int = 0

    def __post_init__(self) -> None:
        numbers = {"block": 1, "tile": 1, "pool": 1, "sinks": 0} | dict.fromkeys(NEED_A_POOL, 0)
        for field, least in numbers.items():
            value = getattr(self, field)
            if not is_whole(value) or value < least:
                raise ValueError(f"{field} must be a whole number of at least {least}, got {value!r}")
            if value > MOST:
                raise ValueError(f"{field} must be at most {MOST:,}, got {value!r}")
        if self.tile % self.pool:
            raise ValueError(f"pool = {self.pool} must divide the tile of {self.tile} rows")
        if self.pool == 1:  # no tile is pooled, and policies that mean the same are equal
            for field in NEED_A_POOL:
                object.__setattr__(self, field, 0)
        if self.outlying and self.scored >= self.tile:
            raise ValueError(
                f"outlying = {self.outlying} beside means of {self.pool} rows is as much work as all {self.tile} rows: "
                f"use at most outlying = {self.tile - self.tile // self.pool - 1}, a larger pool, or pool = 1"
            )
        if not isinstance(self.aggregate, str) or self.aggregate not in REDUCTIONS:
            raise unknown("aggregate", self.aggregate, REDUCTIONS)
        if self.share not in SHARES:
            raise unknown("share", self.share, SHARES)
        if not isinstance(self.rule, Rule):
            raise TypeError(f"rule must be a Rule, such as closecall.RULES['topk'](budget=8), got {self.rule!r}")
        if self.scorer is None and self.rule.needs_scores:
            raise ValueError(f"rule {self.rule.name!r} needs a scorer: one of {', '.join(SCORERS.names())}")
        if self.scorer is not None:
            _check_scorer(self.scorer)
            _check_registered(self.scorer)
        _check_registered(self.rule)
        if self.candidates and self.rule.tile_budget is None:
            raise ValueError(
                f"candidates = {self.candidates} needs a rule with a tile budget to be multiples of, and "
                f"{self.rule.name!r} has none: use candidates = 0, or a rule like topk, router or last-tile"
            )
        if self.scorer is not None:
            self.scorer.check(self)
        self.rule.check(self)

    @property
    def name(self) -> str:
        """The preset this is a variant of, or rule-on-scorer."""
        parts = (self.scorer.name if self.scorer else None, self.rule.name)
        values = self.rule.to_dict() | (self.scorer.to_dict() if self.scorer else {}) | {"aggregate": self.aggregate}
        for name, defaults in GIVEN.items():
            if PRESETS[name] == parts and defaults.items() <= values.items():
                return name
        return composed(*parts)

    @property
    def reduction(self) -> Reduction:
        """What `aggregate` names: how a tile's rows become one score per block."""
        return REDUCTIONS[self.aggregate]

    @property
    def scored(self) -> int:
        """How many vectors a whole tile is scored by: its rows, or means of them and outlying rows."""
        return self.tile // self.pool + self.outlying

    @property
    def most_forced(self) -> int:
        """The most blocks any tile can be forced to keep: the sinks, and its own blocks when off the block grid."""
        return self.sinks + (self.tile + self.block - 2) // self.block + 1

    def no_room(self, forced: int, which: str) -> ValueError:
        """Makes the error for a tile budget that does not exceed the forced blocks."""
        return ValueError(
            f"tile budget {self.rule.tile_budget} must exceed the {forced} {which} ({self.sinks} sink, the rest its "
            f"own): {self.rule.remedy(forced + 1)}"
        )

    def every_row(self, geometry: Geometry, told: Tensor | None = None) -> Tensor | None:
        """bool `[B, T]`, on the host: tiles whose rows are scored one by one though the policy pools; None means none.

        `told` replaces the sequences that the rule is told of where they are not the geometry's (paged calls).
        """
        if self.pool == 1:
            return None
        protected = self.rule.every_row(geometry.told if told is None else told)
        if not self.unpooled:
            return protected
        last = geometry.among_last(self.unpooled)
        return last if protected is None else last | protected

    def n_candidates(self, n_blocks: int) -> int:
        """The most blocks of a tile that are scored again, at least as many as it may keep; 0 without candidates."""
        if not self.candidates:
            return 0
        assert self.rule.tile_budget is not None
        return min(max(self.candidates * self.rule.tile_budget, self.rule.limit(n_blocks)), n_blocks)

    def replace(self, **fields: Any) -> Policy:
        return dataclasses.replace(self, **fields)

    def for_layer(self, index: int) -> Policy:
        """The policy of one layer of a model: itself, unless a part of its rule was fitted layer by layer."""
        rule = self.rule.for_layer(index)
        return self if rule is self.rule else self.replace(rule=rule)

    def times(self, factor: float) -> Policy:
        """This policy with `factor` times the blocks for every head, as far as its rule has budgets by head.

        Budgets were tuned at one length of prompt. At twice that length, twice the blocks are the same share.
        """
        if not is_number(factor) or not 0 < factor <= MOST:
            raise ValueError(f"times must be a number above 0 and at most {MOST:,}, got {factor!r}")
        rule = self.rule.times(factor, self.most_forced + 1)
        if rule is self.rule:
            raise ValueError(
                f"times= multiplies budgets by head, which `closecall tune` fits, and this policy has none: "
                f"{self.rule.describe()}"
            )
        return self.replace(rule=rule)

    def to_json(self) -> str:
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        # As before there were these fields, so that what was stored under a policy's JSON is still found.
        for later in ("pool", "share", *NEED_A_POOL):
            if data[later] == getattr(Policy, later):
                del data[later]
        parts = {k: v.to_dict() if isinstance(v, Component) else v for k, v in data.items()}
        return json.dumps({"closecall_policy": JSON_VERSION} | parts)

    @classmethod
    def from_json(cls, text: str) -> Policy:
        """Reads what `to_json` wrote. For a file, use `load`."""
        if isinstance(text, os.PathLike) or (isinstance(text, str) and text.strip().endswith(".json")):
            raise TypeError(f"from_json takes JSON text, got the path {os.fspath(text)!r}: use Policy.load(path)")
        if not isinstance(text, str):
            raise TypeError(f"from_json takes JSON text, as Policy.to_json writes it, got {type(text).__name__}")
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a policy's JSON text: {error}; for a file, use Policy.load(path)") from error
        version = data.pop("closecall_policy", None) if isinstance(data, dict) else None
        if version != JSON_VERSION:
            raise ValueError(f"not a policy of JSON version {JSON_VERSION}: closecall_policy is {version!r}")
        data.pop("measured", None)  # what a file says of how the policy did is no part of it
        scorer, rule = data.pop("scorer", None), data.pop("rule", None)
        known = {f.name for f in dataclasses.fields(cls)} - {"scorer", "rule"}
        for key in data:
            if key not in known:
                raise unknown("policy field", key, known)
        return cls(scorer=SCORERS.from_dict(scorer) if scorer else None, rule=RULES.from_dict(rule), **data)

    def save(self, path: str | os.PathLike[str], *, measured: Mapping[str, Any] | None = None) -> None:
        """Writes a file that `load`, `attach` and the command line read. The file is written whole or not at all.

        `measured` is anything that JSON can hold. It is in the file for people to read; `load` ignores it.
        """
        if measured is not None and not isinstance(measured, Mapping):
            raise TypeError(f"measured must be a mapping that JSON can hold, or None, got {measured!r}")
        target = Path(path)
        if not target.parent.is_dir():
            raise FileNotFoundError(f"cannot save a policy to {str(path)!r}: there is no folder {str(target.parent)!r}")
        if target.is_dir():
            raise IsADirectoryError(f"cannot save a policy to {str(path)!r}: that is a folder")
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            data = json.loads(self.to_json()) | ({} if measured is None else {"measured": dict(measured)})
            part.write_text(json.dumps(data) + "\n", encoding="utf-8")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Policy:
        """Reads a file that `save` wrote."""
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"load takes the path of a saved policy, got {type(path).__name__}")
        source = Path(path)
        if not source.is_file():
            raise FileNotFoundError(
                f"no policy file {str(path)!r}: Policy.save(path) writes one, and so does `closecall calibrate --out`"
            )
        try:
            return cls.from_json(source.read_text(encoding="utf-8"))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{str(path)!r} is no policy as Policy.save writes it: {error}") from error

    def __str__(self) -> str:
        if self.scorer is None:
            return f"{self.name}: {self.rule.describe()}"
        beside = f" and {self.outlying} outlying rows" if self.outlying else ""
        rows = f"means of {self.pool} rows{beside} of " if self.pool > 1 else ""
        single = f" (of the last {self.unpooled}, every row)" if self.unpooled else ""
        again = (
            f"the {self.n_candidates(sys.maxsize)} best blocks scored again by every row; " if self.candidates else ""
        )
        return (
            f"{self.name}: {self.scorer.describe()}, {self.aggregate} over {rows}{self.tile}-row tiles{single}"
            f"{' and the heads of a KV head' if self.share == 'group' else ''}; {again}"
            f"{self.rule.describe()}; blocks of {self.block} keys, {self.sinks} sink"
        )


def _check_scorer(value: object) -> None:
    if not isinstance(value, Scorer):
        raise TypeError(f"scorer must be a Scorer or one of {', '.join(SCORERS.names())}, got {value!r}")


def _scorer(named: Scorer | str, overrides: dict[str, Any]) -> Scorer:
    """Makes a scorer from its name or an instance, with the overrides that it takes."""
    if isinstance(named, str):
        return SCORERS.make(named, overrides)
    _check_scorer(named)
    return named.with_overrides(overrides)


def _check_registered(part: Scorer | Rule | Trigger) -> None:
    """Raises unless the part and all that it is made of are registered."""
    registry: Registry[Any] = SCORERS if isinstance(part, Scorer) else RULES if isinstance(part, Rule) else TRIGGERS
    registry.check(part)
    for f in dataclasses.fields(part):
        inner = getattr(part, f.name)
        if isinstance(inner, (Rule, Trigger)):
            _check_registered(inner)


def _compose(name: str, overrides: Mapping[str, Any]) -> tuple[Scorer | None, Rule, dict[str, Any]]:
    """Makes the scorer, the rule and the other fields of a preset. Overrides without effect are not noticed here."""
    scorer_name, rule_name = parts_of(name)
    chosen = GIVEN.get(name, {}) | dict(overrides)
    scorer = _scorer(chosen.get("scorer", scorer_name), chosen) if scorer_name else None
    own = {key: chosen[key] for key in (OWN if scorer_name else GRID) if key in chosen and key != "scorer"}
    return scorer, RULES[rule_name].from_overrides(chosen), _with_pool(name, own) | own


def _with_pool(name: str, own: Mapping[str, Any]) -> dict[str, int]:
    """What comes with the preset's pool; nothing without one, or in tiles too small for so many outlying rows."""
    tile, pool, given = own.get("tile", Policy.tile), own.get("pool", Policy.pool), WITH_POOL.get(name, {})
    if not given or not isinstance(tile, int) or not isinstance(pool, int) or pool < 2:
        return {}
    return {} if tile // pool + given["outlying"] >= tile else given


def _taken(scorer: Scorer | None, rule: Rule, own: Mapping[str, Any]) -> set[str]:
    """Names the overrides that have an effect on a policy of these parts and fields."""
    if scorer is None:
        return rule.parameters() | set(GRID)
    idle = NEED_A_POOL if own.get("pool", 1) == 1 else ()
    return rule.parameters() | scorer.parameters() | set(OWN).difference(idle)


def _owners(key: str) -> str:
    """Lists the parts that take this parameter."""
    registries: tuple[Registry[Any], ...] = (SCORERS, RULES, TRIGGERS)
    named = [f"{r.kind} {owner!r}" for r in registries for owner in r.parameters().get(key, [])]
    every = "every policy that pools rows (pool=8)" if key in NEED_A_POOL else "every policy with a scorer"
    return ", ".join(named) or (every if key in OWN else "")


def _check_used(name: str, overrides: Iterable[str], scorer: Scorer | None, rule: Rule, own: Mapping[str, Any]) -> None:
    """Raises on the first override without effect."""
    taken = _taken(scorer, rule, own)
    for key in overrides:
        if key in taken:
            continue
        if any(f.name == key for f in dataclasses.fields(rule)):  # it has that parameter, and another one overrules it
            raise ValueError(f"{key}= has no effect here: the policy is to {rule.describe()}")
        if owners := _owners(key):
            parts = f"rule {rule.name!r}" + (f" on scorer {scorer.name!r}" if scorer else "")
            raise ValueError(f"{key}= has no effect on {parts}: it belongs to {owners}")
        near = difflib.get_close_matches(key, sorted(taken), n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ValueError(f"unknown policy override {key!r}: {hint}{name} takes {', '.join(sorted(taken))}")


def accepted(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides that have an effect on this policy: for a sweep of one set over several policies.

    >>> accepted("dense", {"budget": 8, "block": 32})
    {'block': 32}
    """
    scorer, rule, own = _compose(name, overrides)
    taken = _taken(scorer, rule, own)
    return {key: value for key, value in overrides.items() if key in taken}


def policy(name: str, **overrides: Any) -> Policy:
    """Makes a policy from a preset and overrides, or from text that holds both, as `parse` reads it.

    Presets: `dense`, `topk`, `quest`, `router`, `router-on-quest`, and `auto`, our own best; any other composition is
    called `RULE-on-SCORER`, such as `topk-on-box`. Overrides, with their defaults, are

    - the policy's own fields: `block=64, tile=64, sinks=1, aggregate="max", pool=1, outlying=0, unpooled=0,
      candidates=0, share="head"`, and `scorer=` for another scorer;
    - the parameters of its rule, trigger and scorer: `budget=33, tile_factor=2` of top-k and all that is built on it,
      `q=0.4, rho=2, trigger="quantile"` of routers, `seed=` of `trigger="random"`, `c=` of the scorer `box`.

    An override without effect on the policy is an error. To sweep one set over several policies, filter it with
    `accepted`.

    >>> print(policy("router-on-quest", budget=33).rule.tile_budget)
    66
    >>> print(policy("topk", scorer="box", c=0.25).name)
    topk-on-box
    >>> policy("auto:budget=8") == policy("auto", budget=8)
    True
    """
    if not isinstance(name, str):
        raise TypeError(f"policy takes a name or text such as 'auto:budget=8', got {type(name).__name__}")
    if ":" in name or name.endswith(".json"):
        if overrides:
            raise ValueError(
                f"{name!r} is a whole policy already: write {', '.join(overrides)} into it, or give a name only"
            )
        return parse(name)
    if parts_of(name)[0] is None and "scorer" in overrides:
        raise ValueError(f"policy {name!r} ranks nothing and has no scorer: leave scorer= out")
    scorer, rule, own = _compose(name, overrides)
    _check_used(name, overrides, scorer, rule, own)
    return Policy(scorer, rule, **own)


def parse(text: str) -> Policy:
    """Reads a policy as it is written on a command line.

    A preset's name or `RULE-on-SCORER`, with overrides behind a colon: `auto:budget=8`, `topk-on-box:c=0.25,budget=4`.
    Or a saved policy: `policy.json`, or any path behind `file:`. Or one that we tuned to a model: `tuned:smollm2`, or
    `tuned:smollm2:times=2` with twice the blocks for every head, for prompts twice as long as it was tuned on.
    """
    text = text.strip()
    if text.startswith((FILE, TUNED)):
        path, times = saved_at(text)
        made = Policy.load(path)
        return made if times is None else made.times(times)
    name, _, options = text.partition(":")
    if name.endswith(".json") and not options:
        return Policy.load(name)
    try:
        return policy(name, **read_overrides(options, text))
    except TypeError as error:
        raise ValueError(f"{text!r}: {error}") from error


def saved_at(text: str) -> tuple[str, float | None]:
    """The path of the policy that `file:PATH` or `tuned:NAME` stands for, and what to multiply its budgets by."""
    named, given, written = text.rpartition(TIMES) if TIMES in text else (text, "", "")
    overrides = read_overrides(f"times={written}", text) if given else {}
    if others := [f"{name}=" for name in overrides if name != "times"]:
        raise ValueError(f"{text!r}: a saved policy takes only times=, got {', '.join(others)}")
    times = overrides.get("times")
    if given and not is_number(times):
        raise ValueError(f"{text!r}: times must be a number, such as 2, got {written!r}")
    path = named.removeprefix(FILE)
    if named.startswith(TUNED):
        name, more, options = named.removeprefix(TUNED).partition(":")
        if more:
            raise ValueError(
                f"{text!r}: a tuned policy takes only times=, as in {TUNED}{name}{TIMES}2, got {options!r}"
            )
        path = str(tuned_path(name))
    elif not path:
        raise ValueError(f"{FILE} needs the path of a saved policy: {FILE}out/policy.json")
    return path, times


def as_policy(value: Policy | str | os.PathLike[str]) -> Policy:
    """Accepts what users pass for a policy: a `Policy`, text as `parse` reads it, or the path of a saved policy."""
    if isinstance(value, Policy):
        return value
    if isinstance(value, str):
        return parse(value)
    if isinstance(value, os.PathLike):
        return Policy.load(value)
    raise TypeError(
        "policy must be a closecall.Policy, a preset's name, text such as 'auto:budget=8', or the path of a saved "
        f"policy, got {type(value).__name__}"
    )
