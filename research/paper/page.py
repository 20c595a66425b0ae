"""The page of a reproduction: our figures beside the paper's, then all that was measured on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from closecall_lab.report.compose import LEAD, drawn, setting_section
from closecall_lab.spine.page import Page, Section

from . import beside
from .reproduce import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def reproduction(outcome: Outcome) -> Page:
    """Our figures beside the paper's, then all that was measured on the way."""
    plan, gathered = outcome.plan, outcome.gathered
    sections = [Section("Ours beside the paper's", plan.left_out, beside.BESIDE[plan.experiment.name](outcome))]
    pictures: dict[str, Figure] = {}
    captions: dict[str, str] = {}
    for model in gathered.models:
        settings = gathered.of(model)
        made, about = drawn(model, settings)
        pictures |= made
        captions |= about
        sections.append(Section(f"Everything measured: {model}", figures=list(made)))
        sections += [setting_section(s) for s in settings]
    return Page(plan.title, (*plan.lead, *LEAD, *gathered.notes), sections, pictures, captions)
