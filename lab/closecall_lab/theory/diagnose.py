"""Runs a model over prompts of a task and streams what its tiles' scores look like into a dump."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from closecall.hf.attach import attach
from closecall.hf.op import Call
from closecall.policy import Policy, policy
from closecall.rules.base import RULES
from closecall.scorers.base import SCORERS

from .. import tasks
from ..eval.subject import Subject
from ..spine.last_row import last_row
from ..spine.progress import Say, say
from ..tasks.example import Encoded, Example, answer_tokens, encode_example, gold_blocks
from .cells import check_context, check_scorer, measure
from .dump import Writer


@dataclass(frozen=True)
class Study:
    """What is diagnosed. `prefill`: what the model runs on meanwhile, dense attention or each policy itself."""

    model: str
    task: str
    context: int
    n: int = 4
    seed: int = 0
    scorers: tuple[str, ...] = ("mean", "quest")
    budget: int = 33
    tile_factor: float = 2
    q: float = 0.4
    rho: float = 2
    prefill: Literal["dense", "policy"] = "dense"
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.prefill not in ("dense", "policy"):
            raise ValueError(f"prefill must be 'dense' or 'policy', got {self.prefill!r}")
        for made in self.policies:
            check_scorer(made.scorer)
            check_context(self.context, made)

    @property
    def policies(self) -> list[Policy]:
        """A router on each scorer."""
        params = {"budget": self.budget, "tile_factor": self.tile_factor, "q": self.q, "rho": self.rho}
        return [Policy(SCORERS.make(name, {}), RULES.make("router", params)) for name in self.scorers]

    @property
    def facts(self) -> dict[str, Any]:
        rule: Any = self.policies[0].rule
        grid = {name: getattr(self.policies[0], name) for name in ("block", "tile", "sinks")}
        asked = {
            name: getattr(self, name)
            for name in ("model", "context", "n", "seed", "budget", "tile_factor", "q", "rho", "prefill")
        }
        return asked | grid | {
            "task": str(tasks.get(self.task)),
            "scorers": list(self.scorers),
            "tile_budget": rule.tile_budget,
            "expanded_budget": rule.expanded_budget,
        }  # fmt: skip


def asked_at(example: Example, encoded: Encoded, block: int, tile: int) -> dict[int, list[int]]:
    """Maps each tile in which something is asked to the gold blocks it needs.

    A question is asked where its answer begins, or at the end of the prompt. In a context that questions continue
    (`shared`) nothing is asked.
    """
    gold_by_tile: dict[int, list[int]] = {}
    for question in () if example.shared else example.questions:
        forced = question.at is not None
        row = answer_tokens(example, question, encoded.offsets).start - 1 if forced else len(encoded.ids) - 1
        gold = [b for span in gold_blocks(example, question, encoded.offsets, block) for b in span]
        gold_by_tile.setdefault(row // tile, []).extend(gold)
    return gold_by_tile


def diagnose(study: Study, path: str | Path, *, subject: Subject | None = None, log: Say = say) -> int:
    """Writes the dump and returns its number of cells. `subject`: the model, if it is loaded already."""
    task = tasks.get(study.task)
    subject = subject or Subject.open(study.model, dtype=study.dtype)
    loaded, policies = subject.loaded, study.policies
    runs = [(policy("dense"), policies)] if study.prefill == "dense" else [(p, [p]) for p in policies]
    about = study.facts | {"label": loaded.label, "fingerprint": subject.fingerprint, "dtype": str(loaded.model.dtype)}
    with Writer(path, about) as writer:
        examples = task.examples(loaded.tokenizer, study.context, study.n, study.seed, wrap=loaded.prompt)
        for number, example in enumerate(examples):
            begin, before = time.perf_counter(), writer.cells
            encoded = encode_example(loaded.tokenizer, example)
            check_context(len(encoded.ids), policies[0])
            gold = asked_at(example, encoded, policies[0].block, policies[0].tile)
            for prefill, measured in runs:
                _watch(loaded.model, encoded.ids, prefill, measured, gold, number, writer)
            log(
                f"prompt {number + 1} of {study.n}: {len(encoded.ids)} tokens, {writer.cells - before} cells, "
                f"{time.perf_counter() - begin:.0f} s"
            )
        if not writer.cells:
            raise ValueError(f"{task} has no prompt at {study.context} tokens")
    return writer.cells


@torch.no_grad()
def _watch(
    model: Any,
    ids: list[int],
    prefill: Policy,
    measured: Sequence[Policy],
    gold: dict[int, list[int]],
    number: int,
    writer: Writer,
) -> None:
    def see(layer: int, call: Call) -> None:
        seen = call.seen
        if not seen.geometry.whole or seen.geometry.batch != 1 or seen.q.shape[2] != len(ids):
            raise ValueError(f"layer {layer} did not get the whole prompt in one call: diagnose one prompt at a time")
        tiles = measure(seen.q[0], seen.k[0], measured, scale=call.scale, softcap=call.softcap, gold=gold)
        for rows in tiles:
            for made, cells in zip(measured, rows, strict=True):
                assert made.scorer is not None
                writer.add(made.scorer.name, number, layer, cells)
        writer.flush()  # a layer is a row group, so that a reader has a whole one in hand

    with attach(model, prefill) as handle:
        handle.tap(see)
        model(torch.tensor([ids], device=model.device), logits_to_keep=last_row(model), use_cache=False)
