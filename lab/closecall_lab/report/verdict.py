"""What a store of results says, in a few lines: what was asked, who comes closest to dense, who beats whom."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from ..eval.spec import Spec
from ..eval.summary import Variant
from ..spine.numbers import p_text, plural, size
from .gather import Finding, Gathered, Setting, Texts, budget_text
from .rivals import DENSE
from .standings import Standing, bouts, over_all


def verdict(gathered: Gathered) -> list[str]:
    """Sums a store up in at most four lines for each model, and one about remarks."""
    lines: list[str] = []
    together = over_all(bouts([s for model in gathered.models for s in gathered.of(model)]))
    for model in gathered.models:
        settings, read = gathered.of(model), gathered.texts_of(model)
        mine = [s for s in together if s.first.setting.model == model]
        lines += (_model(model, settings, mine) if settings else []) + ([_texts(model, read)] if read else [])
    remarks = sum(len(place.notes) for place in gathered.places)
    return lines + ([f"{plural(remarks, 'remark')} on what is missing or odd: see the page."] if remarks else [])


def _model(model: str, settings: Sequence[Setting], together: Sequence[Standing]) -> list[str]:
    settings = [s for s in settings if s.findings]
    if not settings:
        return [f"{model}: no example was run by all policies, so there is nothing to compare."]
    tasks = ", ".join(dict.fromkeys(s.task for s in settings))
    contexts = ", ".join(map(size, sorted({s.context for s in settings if s.context})))
    asked = (
        f"{model}: {tasks}{f' at {contexts}' if contexts else ''}, {_range([s.questions for s in settings])} questions"
    )
    dense = [f.accuracy.value for s in settings if (f := s.find(*DENSE)) is not None]
    return [
        asked + (f"; dense answers {statistics.fmean(dense):.0%}" if dense else "; dense was not run"),
        *_closest(settings),
        _tests(settings, together),
    ]


def _texts(model: str, found: Sequence[Texts]) -> str:
    """The policy with the least mean KL, of those that read the most texts, and the same ones."""
    kl: dict[Variant, dict[str, float]] = defaultdict(dict)
    kept: dict[Variant, list[float]] = defaultdict(list)
    for texts in found:
        for variant, by_text in texts.kl.items():
            if _sparse(variant):
                kl[variant] |= by_text
                kept[variant] += [texts.lines[variant].kept_fraction] * len(by_text)
    if not kl:
        read = sum(len(next(iter(texts.kl.values()), ())) for texts in found)
        return f"{model}: {plural(read, 'text')} read by dense only."
    by_texts: dict[frozenset[str], list[Variant]] = defaultdict(list)
    for variant, by_text in kl.items():
        by_texts[frozenset(by_text)].append(variant)
    same = max(by_texts, key=lambda read: (len(read), len(by_texts[read])))
    mean = {v: statistics.fmean(kl[v].values()) for v in by_texts[same]}
    best = min(mean, key=lambda v: mean[v])
    said = f"{model}: {plural(len(same), 'text')} read; nearest to dense: {_name(best)}, with a mean KL of"
    return f"{said} {mean[best]:.4f}, reading {statistics.fmean(kept[best]):.0%} of the blocks."


def _sparse(variant: Variant) -> bool:
    return Spec.parse(variant[0]).preset != "dense"


def _name(variant: Variant) -> str:
    """The policy and its budget; a policy without one, as a tuned one is, has its name alone."""
    policy, budget = variant
    spec = Spec.parse(policy)
    return f"{spec.title}, {budget_text(spec, budget)}" if budget else spec.title


def _range(values: Sequence[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"


def _closest(settings: Sequence[Setting]) -> list[str]:
    """The policy with the best mean paired recall, of those that ran where dense answers most questions, and the same
    ones; of equals, the one that reads least."""
    paired: dict[Variant, dict[int, Finding]] = defaultdict(dict)
    answered: dict[int, int] = {}
    for place, s in enumerate(settings):
        for f in s.findings:
            if _sparse(f.variant) and not f.spec.control and f.paired is not None and f.paired.n:
                paired[f.variant][place] = f
                answered[place] = f.paired.n
    if not paired:
        return []
    by_places: dict[frozenset[int], list[list[Finding]]] = defaultdict(list)
    for found in paired.values():
        by_places[frozenset(found)].append(list(found.values()))
    same = max(by_places, key=lambda places: (sum(answered[p] for p in places), len(by_places[places])))

    def rank(found: Sequence[Finding]) -> tuple[float, float]:
        recall = statistics.fmean(f.paired.value for f in found if f.paired is not None)
        return recall, -statistics.fmean(f.blocks for f in found)

    best = max(by_places[same], key=rank)
    recall, blocks = rank(best)
    kept = statistics.fmean(f.line.kept_fraction for f in best)
    read = f"reading {-blocks:.1f} blocks of 64 keys a tile ({kept:.0%})"
    return [f"Closest to dense: {best[0].label} keeps {recall:.0%} of its answers, {read}."]


def _tests(settings: Sequence[Setting], together: Sequence[Standing]) -> str:
    """Pairs of policies that differ beyond chance, the most frequent first; over all settings where in none of them."""
    counted: dict[tuple[str, str, str], int] = defaultdict(int)
    tested: dict[tuple[str, str], int] = defaultdict(int)
    for bout in bouts(settings):
        if bout.rival == "dense":
            continue
        pair = (bout.policy, bout.against)
        tested[pair] += 1
        if bout.verdict:
            counted[(*pair, bout.verdict)] += 1
    if not counted:
        if not tested:
            return _against_dense(together)
        whole = [s for s in together if s.verdict and s.first.rival != "dense"]
        if not whole:
            return "Tests, Holm-corrected: no policy differs from another beyond chance."
        pairs = [f"{s.first.policy} is {s.verdict} than {s.first.against} (p {p_text(s.holm)})" for s in whole]
        return f"Tests, Holm-corrected: beyond chance in no single setting, but over all {_three(pairs)}."
    listed = sorted(counted.items(), key=lambda item: -item[1])
    said = [f"{a} is {how} than {b} in {n} of {tested[a, b]}" for (a, b, how), n in listed]
    return f"Tests, Holm-corrected, by setting and budget: {_three(said)}."


def _against_dense(together: Sequence[Standing]) -> str:
    if not together:
        return "Nothing was tested."
    pairs = [f"{s.first.policy} is {s.verdict} than dense (p {p_text(s.holm)})" for s in together if s.verdict]
    return f"Tests, Holm-corrected, against dense only: {_three(pairs) or 'no policy differs from it beyond chance'}."


def _three(said: Sequence[str]) -> str:
    more = f", and {plural(len(said) - 3, 'more pair')}" if len(said) > 3 else ""
    return "; ".join(said[:3]) + more
