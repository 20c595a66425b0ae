"""Who beats whom, over all that a store has: a table that counts cells, one of texts, one with every cell's tests.

Texts are not pooled with answers: KL to dense is another measure. A cell is a model, task, context and budget. Within
it, p-values are Holm-corrected over all tests of its setting, as in the setting's own table; over several cells, whole
examples are exchanged, with all that they scored at any budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..eval import statistics
from ..eval.spec import title
from ..eval.statistics import Comparison
from ..eval.summary import Variant
from ..spine.numbers import p_text, size
from ..spine.table import Column, Table
from . import texts
from .gather import Finding, Gathered, Setting
from .rivals import NEAREST, against, rivals, unbudgeted
from .tables import estimate, p_values

ALPHA = 0.05
RIVALS = {  # in the order of the columns
    "dense": "dense",
    "topk": "topk",
    "quest": "quest",
    "router-on-quest": "router-on-quest",
    "auto": "auto",
    "same scorer": "top-k on its scorer",
    "matched": "/matched",
    "random": "/random",
    "last": "/last",
    "other": "another without a budget",
}


@dataclass(frozen=True)
class Bout:
    """One policy against one rival in one cell."""

    setting: Setting
    finding: Finding
    rival: str  # what it is to the policy, a key of RIVALS
    other: Variant
    test: Comparison

    @property
    def holm(self) -> float:
        return p_values(self.setting, self.test)[1]

    @property
    def verdict(self) -> str:
        if self.holm >= ALPHA:
            return ""
        # In the measure that the test is of: questions answered, or scores where contexts are exchanged.
        gain = self.test.difference.value if self.setting.shared else self.test.wins - self.test.losses
        return "better" if gain > 0 else "worse"

    @property
    def against(self) -> str:
        """The rival, over all budgets."""
        return title(self.other[0])

    @property
    def policy(self) -> str:
        """The policy, over all budgets or multiples."""
        return self.finding.spec.family.title

    @property
    def gaps(self) -> dict[str, float]:
        return self.setting.gaps[self.finding.variant, self.other]

    def __str__(self) -> str:
        # Without a budget the row does not say at which budget the column's rival was, nor who another one is.
        policy = self.finding.variant
        whom = against(policy, self.other).removeprefix(self.rival) if unbudgeted(policy) else ""
        return " ".join(
            filter(None, (whom, self.verdict, f"{self.test.wins}:{self.test.losses} ({p_text(self.holm)})"))
        )


def bouts(settings: Sequence[Setting]) -> Iterator[Bout]:
    for setting in settings:
        for finding in setting.findings:
            met = rivals(finding.variant, setting.kept)
            for rival, other in sorted(met, key=lambda pair: list(RIVALS).index(pair[0])):
                if rival == "topk" and ("same scorer", other) in met:
                    continue  # the same test stands under its scorer
                test = setting.test(finding.variant, other)
                assert test is not None  # every finding is tested against all its rivals
                yield Bout(setting, finding, rival, other, test)


@dataclass(frozen=True)
class Standing:
    """A policy of a model against one rival, over all tasks, contexts and budgets."""

    bouts: Sequence[Bout]
    p: float
    holm: float

    @property
    def first(self) -> Bout:
        return self.bouts[0]

    @property
    def wins(self) -> int:
        return sum(b.test.wins for b in self.bouts)

    @property
    def losses(self) -> int:
        return sum(b.test.losses for b in self.bouts)

    @property
    def verdict(self) -> str:
        """`better`, `worse`, or nothing where the difference of scores is no more than chance."""
        if self.holm >= ALPHA:
            return ""
        return "better" if sum(_gaps(self.bouts).values()) > 0 else "worse"


def over_all(found: Iterable[Bout]) -> list[Standing]:
    together: dict[tuple[str, str], dict[str, list[Bout]]] = {}
    for bout in found:
        met = together.setdefault((bout.setting.model, bout.policy), {})
        met.setdefault(bout.against, []).append(bout)
    groups = [listed for met in together.values() for listed in met.values()]
    raw = [statistics.sign_flips(list(_gaps(listed).values())) for listed in groups]
    return [Standing(*row) for row in zip(groups, raw, statistics.holm(raw), strict=True)]


def counted(found: Sequence[Bout]) -> Table:
    """A row for each model, policy and rival, over all tasks, contexts and budgets."""
    rows = over_all(found)
    columns = (
        Column("model", "first.setting.model", left=True),
        Column("policy", "first.policy", left=True),
        Column("against", "first.against", left=True),
        Column("cells", lambda r: len(r.bouts)),
        Column("better in", lambda r: sum(b.verdict == "better" for b in r.bouts)),
        Column("worse in", lambda r: sum(b.verdict == "worse" for b in r.bouts)),
        Column("only policy", "wins"),
        Column("only other", "losses"),
        Column("p over all", lambda r: p_text(r.p)),
        Column("Holm", lambda r: p_text(r.holm)),
    )
    notes = [
        f"A cell is a task, context and budget. better in, worse in: cells with a Holm-corrected p below {ALPHA:g}.",
        "only policy, only other: questions that one of the two answers, over all cells.",
        "p over all: two-sided, by exchanging whole examples with all they scored at any budget. Holm: over the table.",
        *_nearest(found),
    ]
    return Table("Who beats whom, over all cells", columns, rows, notes, keys=3)


def _nearest(found: Sequence[Bout]) -> list[str]:
    return [NEAREST] if any(unbudgeted(bout.finding.variant) for bout in found) else []


def _gaps(found: Sequence[Bout]) -> dict[str, float]:
    """By how much each example's score is higher, over all cells."""
    sums: dict[str, float] = {}
    for bout in found:
        for example, gap in bout.gaps.items():
            sums[example] = sums.get(example, 0.0) + gap
    return sums


def cells(found: Sequence[Bout]) -> Table:
    """A row for each model, task, context, policy and budget, more for a policy that meets several others without one;
    a column for each rival."""
    rows: dict[tuple[int, Variant], list[dict[str, Any]]] = {}
    for bout in found:
        mine = rows.setdefault((id(bout.setting), bout.finding.variant), [])
        if all(bout.rival in row for row in mine):
            mine.append({"bout": bout})
        next(row for row in mine if bout.rival not in row)[bout.rival] = str(bout)
    columns = (
        Column("model", "bout.setting.model", left=True),
        Column("task", "bout.setting.task", left=True),
        Column("context", lambda r: size(r["bout"].setting.context) if r["bout"].setting.context else None),
        Column("policy", "bout.finding.spec.title", left=True),
        Column("budget (tile budget)", "bout.finding.budget_text", left=True),
        Column("effective", "bout.finding.line.effective_budget", ".1f"),
        Column("questions", "bout.setting.questions"),
        Column("examples", "bout.setting.examples"),
        Column("accuracy", lambda r: estimate(r["bout"].finding.accuracy)),
        *(_rival(name, title) for name, title in RIVALS.items()),
    )
    notes = [
        "A cell of a rival: better or worse where that is more than chance, then questions only the policy answers : "
        "only the rival, and the p-value, Holm-corrected over all tests of the task and context.",
        "p-values: exact McNemar; by exchanging whole contexts where questions share them.",
        "Rivals: topk, quest and router-on-quest at the same budget; top-k on the policy's own scorer; the router's "
        "controls. router-on-quest keeps more blocks: see effective.",
        *_nearest(found),
    ]
    return Table("Who beats whom, cell by cell", columns, [row for mine in rows.values() for row in mine], notes)


def _rival(name: str, title: str) -> Column:
    return Column(f"vs {title}", lambda r: r.get(name), left=True)


def tables(gathered: Gathered) -> list[Table]:
    """Those with something in them: answers over all cells, texts over all kinds, and every cell's tests."""
    found = list(bouts(gathered.settings))
    nearer = texts.nearer(gathered.texts)
    return [*([counted(found)] if found else []), *([nearer] if nearer else []), *([cells(found)] if found else [])]


def markdown(gathered: Gathered) -> str:
    """Writes the tables as Markdown, under headings of the second level."""
    return "\n".join(table.markdown(2) for table in tables(gathered))
