"""Which policies are profiled, under the names that the evaluation store knows them by."""

from __future__ import annotations

from dataclasses import dataclass

from closecall.policy import Policy

from ...eval.spec import Spec, split

UNATTACHED = "unattached"
DENSE = "dense"
PROFILED = ("topk", "router", "router-on-quest")


def named(spec: str, budget: int) -> str:
    """What a policy is called in results, as the store of evaluations calls it."""
    return f"{spec}@{budget}" if budget else spec


@dataclass(frozen=True)
class ProfiledPolicy:
    """A policy at a budget; budget 0 for one without."""

    spec: str
    budget: int
    policy: Policy

    @property
    def name(self) -> str:
        return named(self.spec, self.budget)

    def to_json(self) -> list[str | int]:
        return [self.spec, self.budget, self.policy.to_json()]


def read(policies: str, budgets: tuple[int, ...], *, dense: bool = True) -> tuple[ProfiledPolicy, ...]:
    """Reads a comma-separated list like `topk,router:q=0.3`. Our own dense kernel comes first: it is a baseline."""
    specs = [Spec.parse(text) for text in split(policies)]
    if not specs:
        raise ValueError(f"--policies names nothing: {policies!r}")
    for spec in specs:
        if spec.control == "matched":
            raise ValueError(f"{spec} keeps what its router kept on the same example: profile its router instead")
    listed = [Spec(DENSE), *(s for s in specs if s.preset != DENSE)] if dense else specs
    read = [ProfiledPolicy(str(s), b, s.policy(b or 1)) for s in listed for b in (budgets if s.has_budget else (0,))]
    return tuple(dict.fromkeys(read))
