"""Who is tested against whom: for each policy its rivals among those that ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..eval import summary
from ..eval.spec import CONTROLS, Spec, title
from ..eval.summary import Variant

DENSE: Variant = ("dense", 0)
PRESETS = ("quest", "router-on-quest", "auto")  # whom a policy without a budget meets
NEAREST = (
    "Budget `its own`: a policy without a budget, as a tuned one is. It meets each rival at the budget that read most "
    "nearly as many keys."
)


def unbudgeted(variant: Variant) -> bool:
    """Whether the policy says itself what it keeps, as a tuned one does, so that no budget of the grid was given to it.

    Its name does not tell: that of a tuned `auto` is read back from a store like that of an `auto` with a budget.
    """
    policy, budget = variant
    return not budget and Spec.parse(policy).preset != "dense"


def rivals(policy: Variant, among: Mapping[Variant, float]) -> list[tuple[str, Variant]]:
    """Whom a policy is tested against, as far as they were run, and what they are to it. Dense and the controls are not
    tested themselves. `among` tells for each how much a tile kept."""
    spec = Spec.parse(policy[0])
    if spec.control or spec.preset == "dense":
        return []
    found = _with_as_many_keys(policy, among) if unbudgeted(policy) else _at_its_budget(spec, policy[1])
    return [(what, rival) for what, rival in found if rival in among and rival != policy]


def _at_its_budget(spec: Spec, budget: int) -> list[tuple[str, Variant]]:
    """Dense, top-k on the same grid, and for a router top-k on its own scorer and its controls; with a scorer that the
    paper does not have, also the paper's best, Quest with and without the router."""
    found = {"topk": summary.on_its_grid("topk", spec)}
    if spec.scorer not in ("mean", "quest"):
        found |= {preset: summary.on_its_grid(preset, spec) for preset in ("quest", "router-on-quest")}
    if spec.router:
        found["same scorer"] = summary.plain(spec)
        found |= {control: replace(spec, control=control) for control in reversed(CONTROLS)}
    return [("dense", DENSE), *((what, (str(rival), budget)) for what, rival in found.items())]


def _with_as_many_keys(policy: Variant, among: Mapping[Variant, float]) -> list[tuple[str, Variant]]:
    """Dense; each preset as it is, because nobody ran it on this policy's grid, at the budget that kept most nearly as
    much; and others without a budget, but for multiples of the same policy."""

    def family(variant: Variant) -> Spec:
        return Spec.parse(variant[0]).family

    found: list[tuple[str, Variant]] = [("dense", DENSE)]
    for name in PRESETS:
        budgets = [v for v in among if v[0] == name]
        if budgets:
            found.append((name, min(budgets, key=lambda v: (abs(among[v] - among[policy]), v[1]))))
    others = (v for v in among if unbudgeted(v) and v > policy)  # each two of them meet once
    return found + [("other", v) for v in sorted(others) if family(v) != family(policy)]


def against(policy: Variant, rival: Variant) -> str:
    """The rival's name, with its budget where that is another than the policy's: `quest@8`."""
    return title(rival[0]) if rival[1] == policy[1] else summary.label(rival)


def pairs(among: Mapping[Variant, float]) -> list[tuple[Variant, Variant]]:
    """Every policy with its rivals, as far as they were run: one family for Holm."""
    return list(dict.fromkeys((policy, rival) for policy in among for _, rival in rivals(policy, among)))


def text_pairs(among: Mapping[Variant, float]) -> list[tuple[Variant, Variant]]:
    """Those of texts, without dense: its KL to itself is 0."""
    return [(policy, rival) for policy, rival in pairs(among) if rival != DENSE]
