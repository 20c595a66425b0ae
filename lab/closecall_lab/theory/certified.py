"""What share of a model's rows certifies, beside what share could: certificates and the truth in a real prefill."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from closecall.certify.certificate import certify
from closecall.hf.attach import attach
from closecall.hf.op import Call
from closecall.policy import Policy
from closecall.selection import Selection

from .. import tasks
from ..eval.subject import Subject
from ..spine import files
from ..spine.last_row import last_row
from ..spine.progress import Say, say
from ..spine.table import Column, Table
from ..tasks.example import encode_example
from .diagnose import Study
from .loss import row_shares

NAME = "certified.json"
SHOWN = (0.5, 0.1, 0.01)
LEVELS = tuple(sorted({*SHOWN, *(10 ** (x / 8) for x in range(-48, 1))}))  # 1e-6 to 1


@dataclass
class Share:
    """One scorer at one budget. Rows are (row, head) pairs of every layer."""

    scorer: str
    budget: int
    tile_budget: int
    rows: int = 0
    mass: float = 0.0  # sum of the true dropped mass
    bound: float = 0.0  # and of its bound
    certified: list[int] = field(default_factory=lambda: [0] * len(LEVELS))  # rows whose bound is at most each level
    really: list[int] = field(default_factory=lambda: [0] * len(LEVELS))  # and rows whose true mass is

    def at(self, eps: float) -> tuple[float, float]:
        """The shares of rows that certify at `eps`, and that could."""
        i = LEVELS.index(eps)
        return self.certified[i] / self.rows, self.really[i] / self.rows

    def add(self, truth: Tensor, bound: Tensor) -> None:
        self.rows += truth.numel()
        self.mass += float(truth.sum())
        self.bound += float(bound.double().sum())
        for counts, values in ((self.certified, bound), (self.really, truth)):
            below = torch.searchsorted(values.double().sort().values, torch.tensor(LEVELS).double(), right=True)
            counts[:] = [a + b for a, b in zip(counts, below.tolist(), strict=True)]


def dropped(q: Tensor, k: Tensor, selection: Selection, *, scale: float, softcap: float = 0.0) -> Tensor:
    """float32 `[H, M]`: what every row of one whole prompt really lost; tile by tile."""
    g = selection.geometry
    mass = torch.zeros(q.shape[:2], device=q.device)
    for b, t, rows, keys, _ in g.tiles():
        kept = selection.kept_mask((b, slice(None), t))[:, : int(g.visible[b, t])]
        if not bool(kept.all()):
            shares = row_shares(q, k, rows, keys.stop, block=g.block, scale=scale, softcap=softcap)[0]
            mass[:, rows] = (shares * ~kept[:, None]).sum(-1).clamp(max=1.0)  # the sum's rounding
    return mass


@torch.no_grad()
def shares(subject: Subject, study: Study, budgets: Sequence[int], *, log: Say = say) -> list[Share]:
    """Certifies the study's first prompt under a router on each scorer at each budget."""
    loaded = subject.loaded
    source = tasks.get(study.task)
    example = next(iter(source.examples(loaded.tokenizer, study.context, 1, study.seed, wrap=loaded.prompt)))
    ids = torch.tensor([encode_example(loaded.tokenizer, example).ids], device=loaded.model.device)
    made_shares = []
    for made in (p for budget in budgets for p in _at(study, budget)):
        share = _share(loaded.model, ids, made)
        log(f"certified {share.scorer} at budget {share.budget}")
        made_shares.append(share)
    return made_shares


def _at(study: Study, budget: int) -> list[Policy]:
    rules: list[Any] = [p.rule for p in study.policies]
    return [
        p.replace(rule=dataclasses.replace(rule, budget=budget)) for p, rule in zip(study.policies, rules, strict=True)
    ]


def _share(model: Any, ids: Tensor, policy: Policy) -> Share:
    rule: Any = policy.rule
    assert policy.scorer is not None
    share = Share(policy.scorer.name, rule.budget, rule.tile_budget)

    def see(_: int, call: Call) -> None:
        q, k, v, *_rest = call.seen
        if call.kept is None:
            share.add(torch.zeros(q.shape[1] * q.shape[2]), torch.zeros(q.shape[1] * q.shape[2]))
            return
        bound = certify(q, k, v, call.kept, scale=call.scale, softcap=call.softcap).mass[0]
        truth = dropped(q[0], k[0], call.kept, scale=call.scale, softcap=call.softcap)
        share.add(truth.flatten().cpu(), bound.flatten().cpu())

    with attach(model, policy) as handle:
        handle.tap(see)
        model(ids, logits_to_keep=last_row(model), use_cache=False)
    return share


def write(found: Sequence[Share], directory: Path) -> None:
    files.write(directory / NAME, json.dumps([dataclasses.asdict(s) for s in found]))


def read(directory: Path) -> list[Share]:
    """Reads the shares that `write` left in a directory; none if nothing was certified."""
    path = directory / NAME
    return [Share(**share) for share in json.loads(path.read_text())] if path.exists() else []


def table(shares: Sequence[Share]) -> Table:
    columns = [
        Column("scorer", left=True),
        Column("budget"),
        Column("tile budget"),
        Column("true mass", lambda s: s.mass / s.rows, ".3g"),
        Column("bound", lambda s: s.bound / s.rows, ".3g"),
    ]
    for eps in SHOWN:
        columns.append(Column(f"certified at {eps:g}", lambda s, eps=eps: s.at(eps)[0], ".1%"))  # type: ignore[misc]
        columns.append(Column("could be", lambda s, eps=eps: s.at(eps)[1], ".1%"))  # type: ignore[misc]
    notes = [
        "rows (of all heads and layers) that provably lost at most that share of their softmax mass, and those that "
        "did; first prompt, router on the scorer"
    ]
    return Table("Certified rows", columns, shares, notes)
