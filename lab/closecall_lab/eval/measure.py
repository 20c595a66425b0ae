"""One example under one policy: a prefill by the policy, the answers, and what the selection really kept.

As in the paper, only the prefill is sparse: answers are then generated densely over the cache. Questions whose answer
stands in the prompt are scored in the prefill itself, all of an example's in one forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from closecall.geometry import plan
from closecall.hf.attach import attach
from closecall.models.load import LoadedModel, fingerprint, load_model, without_bars
from closecall.policy import Policy
from closecall.registry import unknown
from closecall.selection import Selection

from ..tasks.example import Example, Task, answer_tokens, encode_example, gold_blocks
from ..tasks.scoring import choice_in, choice_tokens, choose
from .store import Run


@dataclass(frozen=True)
class Subject:
    """A model under evaluation. `fingerprint` is a hash of its configuration and of every byte of its weights."""

    loaded: LoadedModel
    fingerprint: str

    @classmethod
    def open(cls, name: str, *, dtype: str | None = None) -> Subject:
        """By the name of a probe (`probe`, `probe:qwen3`, `probe:qwen3:2` for its seed 2), or as `load_model` takes."""
        loaded = _probe(name) if name.split(":")[0] == "probe" else load_model(name, dtype=dtype)
        return cls(loaded, fingerprint(loaded.model, whole=True))

    @property
    def facts(self) -> dict[str, Any]:
        return {"label": self.loaded.label, "context": self.loaded.context, "dtype": str(self.loaded.model.dtype)}


def _probe(name: str) -> LoadedModel:
    from .. import probes

    _, kind, seed = ([*name.split(":"), "", ""])[:3]
    kind, seed = kind or "qwen2", seed or "0"
    if name.count(":") > 2 or not seed.isdigit():
        raise ValueError(f"a probe is written probe:NAME or probe:NAME:SEED, got {name!r}")
    if kind not in probes.names():
        raise unknown("probe", kind, probes.names())
    with without_bars():
        model, tokenizer = probes.load(kind, seed=int(seed))
    label = f"closecall's {kind}-shaped probe, seed {seed}"
    ready: Any = model
    return LoadedModel(name, label, ready.eval().requires_grad_(False), tokenizer, None, fingerprint(model))


@dataclass
class Sums:
    """One layer's selection, counted."""

    kept: int
    visible: int
    tiles: int
    cut: int = 0
    triggered: int = 0
    last_triggered: float = 0.0
    asked_triggered: list[float] = field(default_factory=list)  # one for each question
    hits: list[list[list[float]]] = field(
        default_factory=list
    )  # question, gold span, block: share of heads that keep it


@dataclass(frozen=True)
class Asked:
    """Where a question is asked, and the blocks of each of its gold spans."""

    row: int
    gold: list[list[int]]


class Watch:
    """Counts selections as the attached model makes them."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self.asked = asked
        self.layers: dict[int, Sums] = {}

    def see(self, layer: int, selection: Selection) -> None:
        geometry, heads = selection.geometry, selection.counts.shape[1]
        if not geometry.whole or geometry.batch != 1 or geometry.q_len != geometry.k_len or layer in self.layers:
            raise ValueError(f"layer {layer} did not make one selection for the whole prompt: evaluate one by one")
        fired = selection.triggered[0].float().mean(0)  # [T]: share of heads, all or none for tile-wise triggers
        tiles = [a.row // geometry.tile for a in self.asked]
        self.layers[layer] = Sums(
            kept=int(selection.counts.sum()),
            visible=int(geometry.visible.sum()) * heads,
            tiles=geometry.n_tiles * heads,
            cut=int((~selection.margin.isnan()).sum()),
            triggered=int(selection.triggered.sum()),
            last_triggered=float(fired[-1]),
            asked_triggered=[float(fired[t]) for t in tiles],
            hits=[
                [_held(selection.kv_idx[0, :, t], span) for span in a.gold]
                for a, t in zip(self.asked, tiles, strict=True)
            ],
        )


def _held(kept: Tensor, blocks: list[int]) -> list[float]:
    """For each block, the share of heads whose kept set `[H, width]` has it."""
    wanted = torch.tensor(blocks, device=kept.device)
    found = (kept[:, :, None] == wanted).any(1).float().mean(0)
    return [float(x) for x in found]


def everything(tokens: int, policy: Policy, heads: int, asked: Sequence[Asked]) -> Sums:
    """Of a layer that left nothing out, and so made no selection."""
    geometry = plan(1, tokens, tokens, policy.block, policy.tile)
    visible = int(geometry.visible.sum()) * heads
    return Sums(
        kept=visible,
        visible=visible,
        tiles=geometry.n_tiles * heads,
        asked_triggered=[0.0 for _ in asked],
        hits=[[[1.0 for _ in span] for span in a.gold] for a in asked],
    )


def measure(subject: Subject, task: Task, example: Example, policy: Policy) -> Run:
    """Runs the example under the policy and scores every question."""
    loaded = subject.loaded
    encoded = encode_example(loaded.tokenizer, example)
    tokens = len(encoded.ids)
    forced = {
        i: answer_tokens(example, question, encoded.offsets)
        for i, question in enumerate(example.questions)
        if question.at is not None
    }
    asked = [
        Asked(
            row=forced[i].start - 1 if i in forced else tokens - 1,
            gold=gold_blocks(example, question, encoded.offsets, policy.block),
        )
        for i, question in enumerate(example.questions)
    ]
    watch = Watch(asked)
    start = time.perf_counter()
    with torch.no_grad(), attach(loaded.model, policy) as handle:
        handle.watch(watch.see)
        answered = _answer(loaded, example, encoded.ids, forced)
        indices = list(handle.stats())
        layers = [watch.layers.get(i) or everything(tokens, policy, 1, asked) for i in indices]
        notes = handle.warnings(tokens)
    wall = time.perf_counter() - start
    answers = [
        _judge(task, example, i, answered, [layer.hits[i] for layer in layers], [s.asked_triggered[i] for s in layers])
        for i in range(len(example.questions))
    ]
    return Run(
        model=subject.fingerprint,
        example=example.digest(),
        policy=policy.to_json(),
        score=sum(a["score"] for a in answers) / len(answers),
        correct=sum(a["correct"] for a in answers),
        questions=len(answers),
        effective_budget=mean([s.kept / s.tiles for s in layers]),
        kept_fraction=mean([s.kept / s.visible for s in layers]),
        prompt_tokens=tokens,
        wall=wall,
        answers=answers,
        layers={"prefill_seconds": round(answered.prefill_seconds, 4)} | by_layer(indices, layers),
        warnings=notes + _too_long(loaded, tokens, example),
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _too_long(loaded: LoadedModel, tokens: int, example: Example) -> list[str]:
    generated = example.max_new_tokens if any(q.at is None for q in example.questions) else 0
    if loaded.context is None or tokens + generated <= loaded.context:
        return []
    return [f"{tokens + generated} tokens are more than the {loaded.context} that {loaded.own_name} was trained for"]


@dataclass(frozen=True)
class _Answered:
    forced: dict[int, str]  # by question: the most likely tokens where its answer stands
    generated: str
    choice: str  # the likeliest of the example's letters as the next token; empty without letters
    prefill_seconds: float


def _answer(loaded: LoadedModel, example: Example, ids: list[int], forced: dict[int, range]) -> _Answered:
    """One prefill, with logits only where they are read, then as many greedy steps as the example allows."""
    model, tokenizer = loaded.model, loaded.tokenizer
    generates = len(forced) < len(example.questions)
    rows = sorted({row - 1 for found in forced.values() for row in found} | ({len(ids) - 1} if generates else set()))
    begin = time.perf_counter()
    out = model(
        torch.tensor([ids], device=model.device),
        logits_to_keep=torch.tensor(rows, device=model.device),
        use_cache=generates,
    )
    best = dict(zip(rows, out.logits[0].argmax(-1).tolist(), strict=True))
    seconds = time.perf_counter() - begin
    answers = {i: str(tokenizer.decode([best[row - 1] for row in found])) for i, found in forced.items()}
    if not generates:
        return _Answered(answers, "", "", seconds)
    choice = ""
    if example.choices:
        choice = choose(out.logits[0, -1], example.choices, choice_tokens(tokenizer, example.choices))
    new = _generate(model, out.past_key_values, best[len(ids) - 1], example.max_new_tokens, _ends(model, tokenizer))
    return _Answered(answers, str(tokenizer.decode(new, skip_special_tokens=True)), choice, seconds)


def _generate(model: Any, cache: Any, token: int, most: int, ends: set[int]) -> list[int]:
    new: list[int] = []
    while len(new) < most and token not in ends:
        new.append(token)
        if len(new) == most:
            break
        out = model(torch.tensor([[token]], device=model.device), past_key_values=cache, use_cache=True)
        token = int(out.logits[0, -1].argmax())
    return new


def _ends(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end an answer."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = named if isinstance(named, (list, tuple)) else [named]
    return {int(t) for t in (*listed, tokenizer.eos_token_id) if t is not None}


Hits = list[list[list[float]]]  # layer, gold span, block: share of heads


def _judge(
    task: Task, example: Example, i: int, answered: _Answered, hits: Hits, triggered: list[float]
) -> dict[str, Any]:
    """The score of question i, and how far its gold blocks were kept, over all layers."""
    question = example.questions[i]
    output = answered.forced.get(i, answered.generated)
    score = float(task.score(example, question, output))
    found: dict[str, Any] = {"score": round(score, 6), "correct": score >= 1, "output": output}
    if example.choices and question.at is None:
        found |= {"choice": answered.choice, "choice_correct": task.score(example, question, answered.choice) >= 1}
        found["unformatted"] = choice_in(output, example.choices) is None
    found["asked_triggered"] = round(mean(triggered), 4)
    flat = [block for layer in hits for span in layer for block in span]
    if flat:
        found |= {"hit": round(mean(flat), 4), "hit_union": round(mean([float(x > 0) for x in flat]), 4)}
    return found


def by_layer(indices: list[int], layers: list[Sums]) -> dict[str, Any]:
    """What was measured layer by layer; over questions where they differ. Null where there is nothing to divide by."""

    def gold(layer: Sums, read: Any) -> float | None:
        found = [read(x) for question in layer.hits for span in question for x in span]
        return round(mean(found), 4) if found else None

    def hop(layer: Sums, k: int) -> float:
        return round(mean([float(x > 0) for spans in layer.hits if len(spans) > k for x in spans[k]]), 4)

    hops = max((len(spans) for spans in layers[0].hits), default=0)
    found: dict[str, Any] = {
        "layer": indices,
        "effective_budget": [round(s.kept / s.tiles, 4) for s in layers],
        "kept_fraction": [round(s.kept / s.visible, 6) for s in layers],
        "trigger_rate": [round(s.triggered / s.cut, 6) if s.cut else None for s in layers],
        "last_triggered": [round(s.last_triggered, 4) for s in layers],
        "asked_triggered": [round(mean(s.asked_triggered), 4) for s in layers],
        "hit": [gold(s, float) for s in layers],
        "hit_union": [gold(s, lambda x: float(x > 0)) for s in layers],
    }
    if hops > 1:
        found["hop_union"] = [[hop(s, k) for s in layers] for k in range(hops)]
    return found
