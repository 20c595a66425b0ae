"""A store whose every number is known: answers are drawn as strings of 0 and 1, the rest follows from a formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from closecall import SCORERS, Policy
from closecall.rules.even import Even
from closecall.rules.per_head import PerHead
from closecall_lab.eval.spec import Spec
from closecall_lab.eval.store import Cell, Run, Store

LAYERS = 3
SAVED = "auto:saved=other-1a2b3c4d"  # a policy without a budget of its own, on blocks of 64 keys
N = 40
RIGHT = {
    "dense": "1" * 36 + "0" * 4,
    "topk": "1" * 18 + "0" * 22,
    "quest": "01" * 12 + "0" * 12 + "1" * 4,
    "router": "0" * 1 + "1" * 23 + "0" * 16,
    "router/matched": "1" * 21 + "0" * 19,
    "router/random": "0" * 20 + "1" * 20,
    "router/last": "1" * 30 + "0" * 10,
}


def add(
    store: Store,
    answers: str | Sequence[str],
    *,
    policy: str,
    budget: int = 0,
    model: str = "a" * 64,
    task: str = "niah-multikey",
    context: int = 8192,
    effective: float = 20.0,
    triggered: float | None = None,
    asked: float = 0.0,
    hit: Sequence[float | None] = (0.25, 0.5, 0.75),
    seconds: float = 2.0,
    seed: int = 0,
    first: int = 0,
    salt: str = "",
    warnings: Sequence[str] = (),
    hops: Sequence[float] = (),
    scores: Sequence[float] | None = None,
    outputs: Sequence[str] | None = None,
    by_logits: Sequence[bool] | None = None,
    kl: Sequence[float] | None = None,
) -> None:
    """Runs of one policy, one for each element of `answers`: a 0 or 1 for each of its questions."""
    spec = Spec.parse(policy)
    for number, bits in enumerate(answers, first):
        made: list[dict[str, Any]] = []
        for bit in bits:
            one: dict[str, Any] = {"score": float(bit), "correct": bit == "1", "output": f"said {bit}"}
            if scores is not None:
                one["score"] = scores[number]
            if outputs is not None:
                one["output"] = outputs[number]
            if by_logits is not None:
                one |= {"choice": "A", "choice_correct": by_logits[number]}
            if kl is not None:
                one |= {"kl": kl[number], "loss": 2 + kl[number], "dense_loss": 2.0, "agreement": one["score"]}
                one |= {"positions": 100, "kl_by_part": [kl[number]] * 2}
            known = [h for h in hit if h is not None]
            if known:
                one |= {"hit": sum(known) / len(known), "hit_union": 1.0}
            made.append(one | {"asked_triggered": asked})
        layers: dict[str, Any] = {
            "prefill_seconds": seconds,
            "layer": list(range(LAYERS)),
            "trigger_rate": [triggered] * LAYERS,
            "asked_triggered": [asked] * LAYERS,
            "last_triggered": [asked] * LAYERS,
            "hit": list(hit),
            "hit_union": [None if h is None else 1.0 for h in hit],
        }
        if hops:
            layers["hop_union"] = [[h] * LAYERS for h in hops]
        run = Run(
            model=model,
            example=f"{task}/{context}/{seed}/{number}{salt}",
            policy=_policy_of(spec, budget or 33, effective).to_json(),
            score=sum(a["score"] for a in made) / len(made),
            correct=sum(a["correct"] for a in made),
            questions=len(made),
            effective_budget=effective,
            kept_fraction=effective / 64,
            prompt_tokens=context,
            wall=seconds + 1,
            answers=made,
            layers=layers,
            warnings=list(warnings),
        )
        store.add(Cell(model, task, context, seed, number, str(spec), budget), run)


def _policy_of(spec: Spec, budget: int, effective: float) -> Policy:
    if str(spec) == SAVED:  # a name as stores have it, of a file that is gone
        return Policy(SCORERS["outliers"](), PerHead(((6, 8),)))
    made = spec.policy(budget)
    return made.replace(rule=Even(keep=effective)) if spec.control == "matched" else made
