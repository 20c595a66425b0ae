"""One case on one backend, held against the reference's selection and float64 attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from closecall import attend, attention, select
from closecall.api import covers_everything
from closecall.checks import check_scale
from closecall.policy import Policy
from closecall.rules.router import Router
from closecall.rules.topk import TopK
from closecall.selection import Selection

from ...spine.results import Facts
from . import exact
from .cases import Case
from .device import Device


class WrongAnswerError(Exception):
    """What a backend returned is not what it must return."""


@dataclass(frozen=True)
class Used:
    """How much of its bound the worst element used: above 1 it is wrong."""

    error: float
    budget: float

    @property
    def share(self) -> float:
        return self.error / self.budget if self.error else 0.0

    def facts(self) -> Facts:
        return {"error": self.error, "budget": self.budget, "used": self.share}


def worst(got: Tensor, expected: Tensor, budget: Tensor, what: str) -> Used:
    """The element that used most of its bound. NaN and infinities must be where they belong."""
    got = got.double()
    odd = (got.isnan() != expected.isnan()) | (got.isinf() != expected.isinf())
    odd |= got.isinf() & (got != expected)
    if bool(odd.any()):
        place = odd.nonzero()[0].tolist()
        raise WrongAnswerError(f"{what} at {place} is {float(got[tuple(place)])}, not {float(expected[tuple(place)])}")
    ordinary = expected.isfinite()
    error = (got - expected).abs().where(ordinary, 0.0).flatten()
    budget = budget.where(ordinary, 0.0).flatten()
    # A bound of zero is for what must be exact: any error at all is infinitely too much.
    share = torch.where(error > 0, error / budget, 0.0)
    at = int(share.argmax())
    used = Used(float(error[at]), float(budget[at]))
    if float(share[at]) > 1:
        place = [int(i) for i in torch.unravel_index(torch.tensor(at), expected.shape)]
        raise WrongAnswerError(f"{what} at {place} is off by {used.error:.3g}, its bound is {used.budget:.3g}")
    return used


def _expected_counts(p: Policy, selection: Selection) -> Tensor:
    visible = selection.geometry.visible[:, None].expand_as(selection.counts)
    if not isinstance(p.rule, TopK):
        return visible
    most = torch.full_like(visible, p.rule.tile_budget)
    if isinstance(p.rule, Router):
        most = torch.where(selection.triggered, p.rule.expanded_budget, most)
    return visible.minimum(most)


def _check_form(p: Policy, selection: Selection) -> None:
    selection.check()
    past = torch.arange(selection.kv_idx.shape[-1]) >= selection.counts[..., None]
    if bool((selection.kv_idx[past] != selection.n_blocks).any()):
        raise WrongAnswerError(f"kv_idx holds something other than the sentinel {selection.n_blocks} past the counts")
    counts = _expected_counts(p, selection)
    if not torch.equal(selection.counts.long(), counts):
        at = (selection.counts != counts).nonzero()[0].tolist()
        raise WrongAnswerError(
            f"tile {at} keeps {int(selection.counts[tuple(at)])} blocks, not {int(counts[tuple(at)])}"
        )
    kept = selection.kept_mask()
    forced = selection.geometry.forced_mask(p.sinks)[:, None]
    if p.scorer is not None and bool((forced & ~kept).any()):
        raise WrongAnswerError(f"tile {(forced & ~kept).any(-1).nonzero()[0].tolist()} drops a forced block")


def _check_cut(scores: exact.Scores, kept: Tensor) -> Used:
    """No dropped block may be better than a kept one by more than rounding can make of it."""
    inside, outside = kept & scores.free, ~kept & scores.free
    better = scores.score[..., None, :] - scores.score[..., :, None]  # [..., kept, dropped]
    room = scores.error[..., None, :] + scores.error[..., :, None]
    pairs = inside[..., :, None] & outside[..., None, :]
    swapped = better.where(pairs, 0.0).clamp(min=0.0)
    return worst(swapped, torch.zeros_like(swapped), room.where(pairs, 0.0), "a dropped block's lead over a kept one")


def _check_triggers(p: Policy, selection: Selection) -> None:
    """The trigger is arithmetic on integers: from the backend's own margins it follows exactly."""
    if not isinstance(p.rule, Router):
        if bool(selection.triggered.any()):
            raise WrongAnswerError("a tile is triggered by a rule that triggers none")
        return
    geometry = selection.geometry
    eligible = geometry.visible > p.rule.tile_budget
    fired = p.rule.trigger.fire(selection.margin, eligible, geometry.sequence, p.rule.q)
    if not torch.equal(fired, selection.triggered):
        at = (fired != selection.triggered).nonzero()[0].tolist()
        raise WrongAnswerError(f"tile {at} is{' not' * bool(fired[tuple(at)])} triggered, against what the margins say")


def _check_identical(selection: Selection, expected: Selection) -> None:
    for name in ("counts", "kv_idx", "triggered"):
        mine, theirs = getattr(selection, name), getattr(expected, name)
        if not torch.equal(mine, theirs):
            at = (mine != theirs).nonzero()[0].tolist()
            raise WrongAnswerError(
                f"{name}{at} = {mine[tuple(at)].item()}, the reference has {theirs[tuple(at)].item()}"
            )
    worst(selection.margin, expected.margin.double(), torch.zeros_like(expected.margin).double(), "margin")


def check_selection(case: Case, q: Tensor, k: Tensor, selection: Selection, u: float) -> Facts:
    """Block for block, where scores are exact; else up to swaps that rounding can make. All tensors on the CPU."""
    p, geometry = case.policy(), selection.geometry
    scale = check_scale(case.scale, case.dim)
    expected = select(q, k, p, scale=scale, backend="reference", **case.arguments())
    _check_form(p, selection)
    kept, theirs = selection.kept_mask(), expected.kept_mask()
    facts: Facts = {
        "tiles": int(geometry.exists.sum()) * case.heads,
        "other_tiles": int((kept != theirs).any(-1).sum()),
        "exact": case.integers or covers_everything(p, geometry),
    }
    if facts["exact"]:
        _check_identical(selection, expected)
        return facts
    scores = exact.scores(q, k, p, geometry, scale, u)
    _check_triggers(p, selection)
    cut = _check_cut(scores, kept)
    margin = worst(selection.margin, scores.margin, scores.margin_error, "margin")
    return facts | {"cut": cut.facts(), "margin": margin.facts()}


def check(case: Case, device: Device, backend: str) -> Facts:
    """Runs the case through `select`, `attend` and `attention`; WrongAnswerError where an answer leaves its bound."""
    p, arguments = case.policy(), {name: x.to(device.place) for name, x in case.arguments().items()}
    q, k, v = case.tensors(device.place)
    shared = {"scale": case.scale, "backend": backend}
    selection = select(q, k, p, **shared, **arguments)  # type: ignore[arg-type]
    out, lse = attend(q, k, v, selection, softcap=case.softcap, return_lse=True, **shared)  # type: ignore[call-overload]
    whole = attention(q, k, v, p, softcap=case.softcap, return_lse=True, **shared, **arguments)  # type: ignore[call-overload]
    q, k, v = (x.cpu() for x in (q, k, v))
    selection = selection.to("cpu")
    facts = {"selection": check_selection(case, q, k, selection, device.roundoff)}
    scale = check_scale(case.scale, case.dim)
    right = exact.attend(q, k, v, selection, scale, case.softcap, device.roundoff)
    for name, (got, sums) in {"attend": (out, lse), "attention": whole}.items():
        if got.dtype != q.dtype or sums.dtype != torch.float32:
            raise WrongAnswerError(f"{name} returns {got.dtype} and {sums.dtype}, not {q.dtype} and torch.float32")
        facts[name] = {
            "out": worst(got.cpu(), right.out, right.out_error, f"{name}: output").facts(),
            "lse": worst(sums.cpu(), right.lse, right.lse_error, f"{name}: log-sum-exp").facts(),
        }
    return facts
