"""Thresholds for the trigger `calibrated`, from a short run of the policy they are for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from closecall.hf.attach import attach
from closecall.policy import Policy
from closecall.rules.router import Router
from closecall.selection import Selection
from closecall.triggers.calibrated import Calibrated, Threshold, mean_margin, threshold_at
from closecall.triggers.quantile import Quantile

from .. import tasks
from ..eval.subject import Subject
from ..spine.last_row import last_row
from ..spine.progress import Say, say
from ..spine.table import Column, Table
from ..tasks.example import encode_example

# By context, by layer: margins [H, tiles] of the tiles of all prompts that could be triggered.
Margins = dict[int, dict[int, Tensor]]


@dataclass(frozen=True)
class Calibration:
    """A policy with its thresholds, and the trigger rates they reach."""

    policy: Policy
    seen: dict[int, dict[int, float]]  # by context, by layer: share of tiles (or cells) of the calibration prompts
    new: dict[int, dict[int, float]]  # and of prompts that the thresholds have not seen
    common: dict[int, float]  # by layer: what one threshold for all layers, of the same mean rate, would trigger

    @property
    def trigger(self) -> Calibrated:
        trigger: Any = self.policy.rule
        found: Calibrated = trigger.trigger
        return found

    def table(self, name: str) -> Table:
        trigger, rule = self.trigger, self.policy.rule
        assert isinstance(rule, Router)
        rows: list[dict[str, Any]] = []
        for layer, threshold in zip(trigger.layers, trigger.thresholds, strict=True):
            heads = threshold if isinstance(threshold, tuple) else (threshold,)
            row: dict[str, Any] = {"layer": layer, "low": min(heads), "high": max(heads), "common": self.common[layer]}
            rows.append(row | {f"{part} {c}": x[layer] for part, rates in self._rates() for c, x in rates.items()})
        columns = [Column("layer")]
        if trigger.per_head:
            columns += [Column("least", "low", ".4f"), Column("largest", "high", ".4f")]
        else:
            columns.append(Column("threshold", "low", ".4f"))
        for part, rates in self._rates():
            for context in rates:
                key = f"{part} {context}"
                columns.append(Column(key, lambda r, key=key: r.get(key), ".1%"))  # type: ignore[misc]
        columns.append(Column("one for all", "common", ".1%"))
        notes = [
            f"trigger rates for a wanted {rule.q:.0%}: on the prompts the thresholds come from, and on new ones; "
            "one for all: the same with one threshold for all layers",
        ]
        return Table(f"Calibrated {name}: {self.policy}", columns, rows, notes)

    def _rates(self) -> list[tuple[str, dict[int, dict[int, float]]]]:
        return [("calibration", self.seen), *([("new", self.new)] if self.new else [])]


def router_of(policy: Policy) -> Router:
    if not isinstance(policy.rule, Router):
        raise ValueError(f"{policy.name} never triggers a tile: calibrate a router, as router-on-quest")
    if not policy.rule.q > 0:
        raise ValueError("q = 0 triggers nothing and needs no threshold: that is topk")
    return policy.rule


def calibrate(
    subject: Subject,
    task: str,
    contexts: Sequence[int],
    policy: Policy,
    *,
    n: int = 4,
    check: int = 2,
    seed: int = 0,
    per_head: bool = False,
    log: Say = say,
) -> Calibration:
    """Finds thresholds that trigger a share q of the tiles of `n` prompts of each context, in every layer.

    The model runs under the policy with the quantile in the trigger's place, so that margins are those of a sparse
    prefill. Then `check` further prompts of each context run under the result.
    """
    rule = router_of(policy)
    if per_head and policy.share == "group":
        raise ValueError("share = 'group': the heads of a KV head decide together: calibrate one threshold a layer")
    quantile = policy.replace(rule=dataclasses.replace(rule, trigger=Quantile()))
    margins, resolved = collect(subject, task, contexts, quantile, range(n), seed, log)
    layers = tuple(sorted(next(iter(margins.values()))))
    if layers[0] < 0:
        raise ValueError("a layer of this model has no number, so a threshold cannot be told to be its own")
    pooled = {i: torch.cat([margins[c][i] for c in margins], 1) for i in layers}
    thresholds = tuple(_threshold(pooled[i], rule.q, per_head) for i in layers)
    fitted = resolved.replace(rule=dataclasses.replace(rule, trigger=Calibrated(thresholds, layers)))
    seen = {c: {i: _rate(margins[c][i], t) for i, t in zip(layers, thresholds, strict=True)} for c in margins}
    every = torch.cat([pooled[i].flatten() if per_head else _tile_means(pooled[i]) for i in layers])
    one = threshold_at(every, rule.q)
    heads = tuple([one] * pooled[layers[0]].shape[0]) if per_head else one
    new: dict[int, dict[int, float]] = {}
    if check:
        rates = collect(subject, task, contexts, fitted, range(n, n + check), seed, log)[0]
        new = {c: {i: _rate(rates[c][i], t) for i, t in zip(layers, thresholds, strict=True)} for c in rates}
    return Calibration(fitted, seen, new, {i: _rate(pooled[i], heads) for i in layers})


def _tile_means(margins: Tensor) -> Tensor:
    return mean_margin(margins[None])[0]


def _threshold(margins: Tensor, q: float, per_head: bool) -> Threshold:
    if per_head:
        return tuple(threshold_at(head, q) for head in margins)
    return threshold_at(_tile_means(margins), q)


def _rate(margins: Tensor, threshold: Threshold) -> float:
    """Returns the share of tiles that the trigger itself fires on."""
    trigger, tiles = Calibrated((threshold,)), margins.shape[1]
    every = torch.ones(1, tiles, dtype=torch.bool)
    return float(trigger.fire(margins[None], every, torch.zeros(1, tiles, dtype=torch.int64), 0.0).double().mean())


@torch.no_grad()
def collect(
    subject: Subject, task: str, contexts: Sequence[int], policy: Policy, numbers: range, seed: int, log: Say
) -> tuple[Margins, Policy]:
    """Runs prompts under a policy; returns the margins, and the policy as it was attached."""
    loaded, source = subject.loaded, tasks.get(task)
    margins: dict[int, dict[int, list[Tensor]]] = {}
    with attach(loaded.model, policy, min_context=0) as handle:
        rule, resolved = router_of(handle.policy), handle.policy
        for context in contexts:
            margins_by_layer: dict[int, list[Tensor]] = {}

            def see(
                layer: int, selection: Selection, margins_by_layer: dict[int, list[Tensor]] = margins_by_layer
            ) -> None:
                margin = selection.margin[0]
                margins_by_layer.setdefault(layer, []).append(margin[:, ~margin.isnan().any(0)].cpu())

            handle.watch(see)
            examples = source.examples(loaded.tokenizer, context, numbers.stop, seed, wrap=loaded.prompt)
            for number, example in enumerate(examples):
                if number not in numbers:
                    continue
                ids = encode_example(loaded.tokenizer, example).ids
                if -(-len(ids) // resolved.block) <= rule.tile_budget:
                    raise ValueError(
                        f"no tile of {len(ids)} tokens sees more than the tile budget of {rule.tile_budget} blocks, so "
                        f"none can be triggered: use a context of at least {rule.tile_budget * resolved.block + 1} "
                        "tokens, or a smaller budget"
                    )
                loaded.model(
                    torch.tensor([ids], device=loaded.model.device),
                    logits_to_keep=last_row(loaded.model),
                    use_cache=False,
                )
                log(f"prompt {number + 1} of {numbers.stop} at {context} tokens")
            if not margins_by_layer:
                raise ValueError(f"{source} has no prompt {numbers.start + 1} at {context} tokens: ask for fewer")
            margins[context] = margins_by_layer
    return {c: {i: torch.cat(x, 1) for i, x in by_layer.items()} for c, by_layer in margins.items()}, resolved
