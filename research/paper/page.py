"""The page of a reproduction: our figures beside the paper's, then all that was measured on the way."""

from __future__ import annotations

from closecall_lab.report.compose import composed
from closecall_lab.spine.page import Page, Section

from . import beside
from .reproduce import Outcome


def reproduction(outcome: Outcome) -> Page:
    plan = outcome.plan
    compared = Section("Ours beside the paper's", plan.left_out, beside.BESIDE[plan.experiment.name](outcome))
    return composed(
        plan.title, outcome.gathered, lambda model: f"Everything measured: {model}", lead=plan.lead, before=[compared]
    )
