"""The panel as text for people: all models as a table, one in full."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from .catalogue import PANEL
from .entry import Entry

HEADINGS = ("name", "full layers", "heads", "dim", "QK-Norm", "context", "attention", "recommended")
NOTE = """\
full layers: those with full attention, which go sparse, of all. heads: query/kv. * in the paper's panel.
`closecall models NAME` tells what is special about one. --model takes these names, any hub id, or a local directory."""


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
        " ".join([entry.preset, *(f"{key}={value}" for key, value in entry.overrides)]),
    )


def table(entries: Sequence[Entry] = PANEL) -> str:
    """All models, a line each."""
    rows = [HEADINGS, *map(_row, entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *body = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join([head, "-" * len(head), *body, "", NOTE])


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
        ("policy", str(entry.policy())),
        ("why", entry.evidence),
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
