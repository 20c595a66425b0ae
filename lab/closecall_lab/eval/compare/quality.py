"""How well a policy does on captured layers: softmax mass it retains, error of the output, gold blocks it keeps.

All of it is exact, up to float32 arithmetic, and needs no (row, key) pairs beyond those of attention itself, but for
the few rows that ask: a row's retained mass is the ratio of its two softmax denominators, over kept keys and over all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from closecall.api import attend, attention, select
from closecall.policy import Policy
from closecall.registry import unknown
from closecall.selection import Selection

from ..matched import matched
from ..spec import Spec
from ..store import SEMANTICS
from .capture import FORMAT, Asked, Capture, CapturedLayer, Prompt

Variant = tuple[Spec, int]
MEASURED = 2  # raise it when more is measured, or otherwise: older findings then no longer count


# Two halves of the examples: one to choose a selector by, one to be looked at once, at the end. Their numbers leave
# this remainder when divided by two.
PARTS = {"choose": 0, "final": 1}


def numbers(part: str, n: int) -> list[int]:
    """The first n example numbers of a part."""
    return [2 * i + PARTS[check_part(part)] for i in range(n)]


def belongs(number: int, part: str) -> bool:
    return number % 2 == PARTS[check_part(part)]


def check_part(part: str) -> str:
    if part not in PARTS:
        raise unknown("split", part, PARTS)
    return part


@dataclass(frozen=True)
class Quality:
    """One policy on one layer of one prompt.

    mass: the share of a row's softmax mass that the kept blocks hold, mean over rows and heads. error: the 2-norm of
    the output's error over all rows and heads, relative to that of the dense output. hit: the share of
    (gold block, head) pairs kept by the tile that asks; union: of gold blocks kept by any head.

    gold_there: the softmax mass that the dense attention of asking rows puts on their gold blocks, summed over rows and
    heads; gold_kept: the part of it in kept blocks. They are sums because most heads look elsewhere: sums add up over
    layers and prompts, while a mean of ratios would be noise from the heads that see nothing.

    None without gold.
    """

    mass: float
    error: float
    hit: float | None
    union: float | None
    effective_budget: float
    gold_kept: float | None
    gold_there: float | None

    @property
    def gold(self) -> float | None:
        """The share of the mass on gold blocks that is kept; None if there is no such mass."""
        return share(self.gold_kept, self.gold_there)


def share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


@dataclass(frozen=True)
class Row:
    """A quality, and the policy, prompt and layer it belongs to."""

    task: str
    context: int
    seed: int
    number: int
    layer: int
    policy: str
    budget: int
    quality: Quality

    @property
    def prompt(self) -> tuple[str, int, int, int]:
        return self.task, self.context, self.seed, self.number


def dense_of(layer: CapturedLayer) -> tuple[Tensor, Tensor]:
    """Attends to all keys: output and log-sum-exp."""
    return attention(layer.q, layer.k, layer.v, "dense", scale=layer.scale, softcap=layer.softcap, return_lse=True)


def block_masses(layer: CapturedLayer, row: int, blocks: Sequence[int], block: int) -> Tensor:
    """float64 `[H, len(blocks)]`: the row's softmax mass on these blocks, of all the keys it sees, head by head."""
    heads, kv_heads, seen = layer.q.shape[1], layer.k.shape[1], row + 1
    q = layer.q[0, :, row].double().view(kv_heads, heads // kv_heads, -1)
    logits = layer.scale * (q @ layer.k[0, :, :seen].double().mT)
    if layer.softcap:
        logits = layer.softcap * (logits / layer.softcap).tanh()
    mass = logits.softmax(-1).flatten(0, 1)
    return torch.stack([mass[:, b * block : (b + 1) * block].sum(1) for b in blocks], 1)


def judge(layer: CapturedLayer, policy: Policy, asked: Sequence[Asked], dense: tuple[Tensor, Tensor]) -> Quality:
    """Judges a policy on one layer, beside what `dense_of` returned for it."""
    return judge_kept(layer, select(layer.q, layer.k, policy, scale=layer.scale), asked, dense)


def judge_kept(layer: CapturedLayer, kept: Selection, asked: Sequence[Asked], dense: tuple[Tensor, Tensor]) -> Quality:
    """Judges a selection, however it was made."""
    whole, whole_lse = dense
    tile, block = kept.geometry.tile, kept.geometry.block
    out, lse = attend(layer.q, layer.k, layer.v, kept, scale=layer.scale, softcap=layer.softcap, return_lse=True)
    mass = (lse.double() - whole_lse.double()).exp().clamp(max=1.0)
    off, size = torch.linalg.vector_norm((out - whole).double()), torch.linalg.vector_norm(whole.double())
    hits: list[Tensor] = []
    gold_kept = gold_there = 0.0
    for one in asked:
        held = kept.kept_mask((0, slice(None), one.row // tile))
        kept_by_head = {b: held[:, b] for b in one.blocks(block)}
        hits += [kept_by_head[b] for b in one.blocks(block)]
        if kept_by_head:  # mass counts once, however many spans share the block
            there = block_masses(layer, one.row, list(kept_by_head), block)
            gold_there += float(there.sum())
            gold_kept += float(there.where(torch.stack(list(kept_by_head.values()), 1), 0.0).sum())
    heads = torch.stack(hits).float() if hits else None
    return Quality(
        mass=float(mass.mean()),
        error=float(off / size) if size > 0 else 0.0,
        hit=None if heads is None else float(heads.mean()),
        union=None if heads is None else float(heads.amax(1).mean()),
        effective_budget=kept.effective_budget,
        gold_kept=None if heads is None else gold_kept,
        gold_there=None if heads is None else gold_there,
    )


class Findings:
    """Qualities found so far, one JSON line each, so that a run that was stopped goes on. Also a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found: dict[str, Quality] = {}
        whole = path.read_bytes() if path.exists() else b""
        good = whole[: whole.rfind(b"\n") + 1]  # a line without an end was being written when its process died
        measured = {f.name for f in dataclasses.fields(Quality)}
        for line in good.splitlines():
            data = json.loads(line)
            key = data.pop("key")
            if set(data) == measured:  # not one of another version, whose key nobody asks for
                self._found[key] = Quality(**data)
        self._file = path.open("ab")
        self._file.truncate(len(good))

    def __enter__(self) -> Findings:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: str) -> Quality | None:
        return self._found.get(key)

    def add(self, key: str, quality: Quality) -> None:
        self._found[key] = quality
        self._file.write(json.dumps({"key": key} | dataclasses.asdict(quality)).encode() + b"\n")
        self._file.flush()


def key_of(capture: Capture, prompt: Prompt, layer: int, policy: Policy) -> str:
    """Writes all that a quality depends on as one key."""
    parts = [SEMANTICS, FORMAT, MEASURED, capture.fingerprint, capture.manifest["saved_as"], prompt.example, layer]
    return hashlib.sha256(json.dumps([*parts, policy.to_json()]).encode()).hexdigest()


def judge_all(
    capture: Capture,
    variants: Sequence[Variant],
    *,
    part: str,
    findings: Findings,
    say: Callable[[str], None] = print,
) -> list[Row]:
    """Judges every policy on every layer of the part's prompts; a matched control follows its router."""
    prompts = [p for p in capture.prompts() if belongs(p.number, part)]
    if not prompts:
        raise ValueError(f"{capture.directory} has no prompts of the {part} part: capture more examples (--n)")
    rows: list[Row] = []
    for i, prompt in enumerate(prompts):
        rows += judge_prompt(capture, prompt, variants, findings)
        say(f"judged {prompt.directory.name} ({i + 1}/{len(prompts)})")
    return rows


def judge_prompt(capture: Capture, prompt: Prompt, variants: Sequence[Variant], findings: Findings) -> list[Row]:
    first = {v: v[0].policy(v[1], prompt.number) for v in variants if v[0].control != "matched"}
    rows = list(_judge(capture, prompt, first, findings))
    spent: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        spent.setdefault((row.policy, row.budget), []).append(row.quality.effective_budget)
    second = {}
    for spec, budget in variants:
        if spec.control == "matched":
            kept = spent[str(spec.base), budget]
            second[spec, budget] = matched(spec.policy(budget, prompt.number), sum(kept) / len(kept), prompt.tokens)
    return rows + list(_judge(capture, prompt, second, findings))


def _on_layer(policy: Policy, number: int) -> Policy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the policy warns of was said of the whole of it
        return policy.for_layer(number)


def _judge(capture: Capture, prompt: Prompt, policies: dict[Variant, Policy], findings: Findings) -> Iterator[Row]:
    """Goes layer by layer, so that each is read, and attended to densely, once for all policies."""
    for number in prompt.layers:
        keys = {variant: key_of(capture, prompt, number, policy) for variant, policy in policies.items()}
        if any(findings.get(key) is None for key in keys.values()):
            layer = prompt.load(number)
            dense = dense_of(layer)
            for variant, policy in policies.items():
                if findings.get(keys[variant]) is None:
                    findings.add(keys[variant], judge(layer, _on_layer(policy, number), prompt.asked, dense))
        for (spec, budget), key in keys.items():
            quality = findings.get(key)
            assert quality is not None
            where = (prompt.task, prompt.context, prompt.seed, prompt.number)
            yield Row(*where, number, str(spec), budget, quality)
