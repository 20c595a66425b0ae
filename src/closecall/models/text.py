"""The models we know as text for people: all of them as a table, one in full."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ..policy import TIMES, TUNED
from ..tuned import shipped, tuned_at
from .catalogue import PANEL
from .entry import Entry, budget_for
from .source import Source, sized

HEADINGS = ("name", "full layers", "heads", "dim", "QK-Norm", "context", "attention", "recommended")
FETCHED = ("`closecall get`", "download", "on disk", "licence")
NOTE = """\
full layers: those with full attention, which go sparse, of all. heads: query/kv. * in the paper's panel.
recommended: the policy to begin with at the full context. For shorter prompts keep an eighth of the blocks again,
budget = tokens / 1024, at least 4: {budgets}.
`closecall models NAME` says why, and what the paper recommends. --model takes these names, a hub id, a directory."""


def _size(count: int) -> str:
    return f"{count // 1024}K" if count % 1024 == 0 else f"{count / 1e6:g}M"


def _row(entry: Entry) -> tuple[str, ...]:
    return (
        entry.name + ("*" if entry.in_paper else ""),
        f"{entry.full_layers}/{entry.layers}",
        f"{entry.q_heads}/{entry.kv_heads}",
        str(entry.head_dim),
        "yes" if entry.qk_norm else "no",
        _size(entry.trained_context),
        "+".join(entry.kinds),
        entry.recommended,
    )


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *body = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
    return [head, "-" * len(head), *body]


def table(entries: Sequence[Entry] = PANEL) -> str:
    """All models, a line each; then what can be fetched without a hub."""
    sources = [entry.source for entry in entries if entry.source is not None]
    fetched = [(s.name, sized(s.download_size), sized(s.disk_size), s.licence) for s in sources]
    budgets = ", ".join(f"{_size(n)} {budget_for(n)}" for n in (4096, 8192, 16384, 32768))
    lines = _columns([HEADINGS, *map(_row, entries)])
    return "\n".join([*lines, "", NOTE.format(budgets=budgets), "", *_columns([FETCHED, *fetched])])


def _fetching(source: Source) -> str:
    return (
        f"`closecall get {source.name}`: {sized(source.download_size)} to download, {sized(source.disk_size)} on disk; "
        f"{source.label}"
    )


def _tuned(entry: Entry) -> str:
    """The policy that we tuned to the model, if we did."""
    if entry.name not in shipped():
        return ""
    context = tuned_at(entry.name)
    times = entry.trained_context // context
    return (
        f"{TUNED}{entry.name}, with a budget for each head, an eighth of the blocks at {_size(context)}; "
        f"{TUNED}{entry.name}{TIMES}{times} at {_size(times * context)}"
    )


def describe(entry: Entry) -> str:
    """One model in full."""
    window = f", window {entry.window}" if entry.window else ""
    layers = f"{entry.full_layers} of {entry.layers} with full attention ({' + '.join(entry.kinds)}{window})"
    norm = "yes" if entry.qk_norm else "no"
    heads = f"{entry.q_heads} query, {entry.kv_heads} kv, dim {entry.head_dim}, QK-Norm {norm}"
    facts: list[tuple[str, str]] = [
        ("hub id", entry.hub_id),
        ("type", entry.model_type),
        ("layers", layers),
        ("heads", heads),
        ("context", f"{entry.trained_context:,} tokens"),
        ("tokenizer", ", ".join(f"{k}={v}" for k, v in entry.tokenizer_options)),
        ("template", ", ".join(f"{k}={v}" for k, v in entry.template_options)),
        ("prefill", entry.choice_prefill and f'"{entry.choice_prefill}" for multiple choice'),
        ("get", _fetching(entry.source) if entry.source else ""),
        ("licence", entry.source.licence if entry.source else ""),
        ("policy", f"{entry.recommended} ({entry.policy()})"),
        ("why", entry.evidence),
        ("tuned", _tuned(entry)),
        ("the paper", entry.paper_recommends),
        *(("quirks", f"- {quirk}") for quirk in entry.quirks),
        *(("sources", f"- {source}") for source in entry.sources),
        *(("unverified", f"- {fact}") for fact in entry.unverified),
    ]
    lines = [entry.name + (" (in the paper's panel)" if entry.in_paper else "")]
    before = ""
    for label, text in facts:
        if text:
            first = f"  {label if label != before else '':11}"
            rest = " " * (len(first) + 2 * text.startswith("- "))
            lines.append(textwrap.fill(text, 116, initial_indent=first, subsequent_indent=rest))
            before = label
    return "\n".join(lines)
