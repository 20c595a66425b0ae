"""The paper's experiments by name: what each runs, in the paper's own contexts and budgets."""

from __future__ import annotations

from dataclasses import dataclass

from closecall.registry import unknown
from closecall_lab.report import paper

K = 1024
FIVE = ("dense", "topk", "router", "quest", "router-on-quest")
NEEDLE, CHASE = "niah-multikey", "pointer-chase"
V2 = "longbench-v2:length=medium"
V1 = {
    "musique-2hop": "longbench-musique:hops=2",
    "musique-4hop": "longbench-musique:hops=4",
    "narrativeqa": "longbench-narrativeqa",
    "qasper": "longbench-qasper",
}
# What the probes, which know a thousand words, have in place of the paper's tasks.
FOR_PROBES = {NEEDLE: "probe-needle", CHASE: "probe-chase"}
QS = (0.1, 0.2, 0.3, 0.4)
THRESHOLDS = (0.01, 0.05, 0.2)


@dataclass(frozen=True)
class Part:
    """One grid of runs: everything with everything."""

    tasks: tuple[str, ...]
    contexts: tuple[int, ...]
    policies: tuple[str, ...]
    budgets: tuple[int, ...] = (33,)


@dataclass(frozen=True)
class Experiment:
    """`n` examples, as the paper had; `data` says that the task's examples come from a file or the hub."""

    name: str
    about: str
    where: str
    n: int
    parts: tuple[Part, ...]
    data: bool = False


def _needles(*policies: str, contexts: tuple[int, ...] = (32 * K,), budgets: tuple[int, ...] = (33,)) -> Part:
    return Part((NEEDLE,), contexts, policies, budgets)


CONTROLLED = [f"{router}{c}" for router in ("router", "router-on-quest") for c in ("", "/matched", "/random", "/last")]
EXPERIMENTS = (
    Experiment(
        "ruler", "accuracy of the five policies on needles with 3 keys, 32K",
        paper.RULER_WHERE, 100, (_needles(*FIVE),),
    ),
    Experiment(
        "longbench-v2", "accuracy and paired recall of the five policies on multiple choice, 32K (needs data)",
        paper.LONGBENCH_V2_WHERE, 215, (Part((V2,), (32 * K,), FIVE),), data=True,
    ),
    Experiment(
        "pareto", "accuracy and wall time against dense as the context grows, 32K to 128K",
        paper.PARETO_WHERE, 100, (_needles(*FIVE, contexts=(32 * K, 64 * K, 128 * K)),),
    ),
    Experiment(
        "budget-match", "how much of the router's lift is budget, how much selectivity",
        paper.BUDGET_MATCH_WHERE, 100,
        (_needles("dense", "topk", "quest", *CONTROLLED), _needles("quest", budgets=(33, 40, 47, 52, 66))),
    ),
    Experiment(
        "pch", "hit rate and time on the pointer-chase haystack, 3 hops, 8K to 64K", paper.PCH_WHERE, 30,
        tuple(Part((CHASE,), (c,), ("dense", "topk", "router:q=0.1"), (b,)) for c, b in paper.PCH_BUDGET.items()),
    ),
    Experiment(
        "q-sweep", "paired recall as the router triggers 10% to 40% of the tiles",
        paper.Q_SWEEP_WHERE, 30, (_needles("dense", "topk", *(f"router:q={q}" for q in QS)),),
    ),
    Experiment(
        "per-cell-trigger", "a rejected trigger: the least decided cells instead of tiles", paper.PER_CELL_WHERE, 30,
        (_needles("dense", "topk", *(f"router:q={q}{t}" for q in QS for t in ("", ",trigger=per-cell"))),),
    ),
    Experiment(
        "absolute-trigger", "a rejected trigger: a fixed threshold on the margin, whatever the layer",
        paper.ABSOLUTE_WHERE, 30,
        (_needles("dense", "topk", "router", *(f"router:threshold={t},trigger=absolute" for t in THRESHOLDS)),),
    ),
    Experiment(
        "longbench-v1", "the negative control: prompts that leave the budget room (needs data)",
        paper.LONGBENCH_V1_WHERE, 30, (Part(tuple(V1.values()), (32 * K,), ("dense", "topk", "router")),), data=True,
    ),
)  # fmt: skip


def get(name: str) -> Experiment:
    by_name = {e.name: e for e in EXPERIMENTS}
    if name not in by_name:
        raise unknown("experiment", name, by_name)
    return by_name[name]


def listing() -> str:
    """What `python -m research.paper` alone prints."""
    width = max(len(e.name) for e in EXPERIMENTS)
    lines = [f"  {e.name:<{width}}  {e.about}  [{e.where}]" for e in EXPERIMENTS]
    usage = "python -m research.paper NAME --model M    M: probe, smollm2 (scaled), or any model (the paper's sizes)"
    return "\n".join(["The paper's experiments:", "", *lines, "", usage])
