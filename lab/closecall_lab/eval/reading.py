"""A text without questions: how far what a policy predicts is from what dense attention predicts, at every position.

Dense's final hidden states are kept (tokens x width, small), and logits are made from them a slice at a time: so the
divergence is exact over the whole vocabulary, and memory is bounded whatever the text's length.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from closecall.hf.attach import attach
from closecall.policy import Policy
from closecall.policy import policy as make_policy

from ..spine.last_row import last_row
from ..tasks.example import Example, encode_example
from ..tasks.text import Text
from .kept import Asked, Prefill, Watch, mean
from .matched import Applied
from .store import Run
from .subject import Subject

SLICE = 128  # rows whose logits are there at once
PARTS = 8  # of a text, from front to back, that are reported apart


class Texts:
    """The task `text` on one model. Dense's reading of the last text is held: all policies are compared with it."""

    def __init__(self, task: Text, subject: Subject) -> None:
        self.task = task
        self.subject = subject
        self._dense: tuple[str, Reading] | None = None  # by the example's digest

    def examples(self, context: int, seed: int) -> Iterator[Example]:
        return self.task.examples(self.subject.loaded.tokenizer, context, 2**31, seed)

    def measure(self, example: Example, applied: Applied) -> Run:
        loaded, digest, policy = self.subject.loaded, example.digest(), applied.policy
        ids = encode_example(loaded.tokenizer, example).ids[: example.context]
        self.subject.check_room(len(ids))
        start = time.perf_counter()
        if self._dense is None or self._dense[0] != digest:
            self._dense = (digest, read(loaded.model, ids, make_policy("dense")))
        dense = self._dense[1]
        reading = read(loaded.model, ids, policy) if policy.rule.needs_scores else dense
        gaps = divergence(loaded.model, dense.hidden, reading.hidden, ids, self.task.positions)
        answer = gaps.summary(len(ids))
        answer["asked_triggered"] = round(mean([s.last_triggered for s in reading.layers]), 4)
        wall = time.perf_counter() - start
        return reading.run(self.subject, example, applied, [answer], len(ids), wall)


@dataclass(frozen=True)
class Reading(Prefill):
    """One prefill of a text, and what the model made of it."""

    hidden: Tensor  # [tokens, width], as the head takes them


def read(model: Any, ids: list[int], policy: Policy) -> Reading:
    """One prefill by the policy."""
    watch, caught = Watch([Asked(row=len(ids) - 1, gold=[])]), []
    hook = model.base_model.register_forward_hook(lambda _, __, out: caught.append(out.last_hidden_state[0]))
    try:
        with torch.no_grad(), attach(model, policy) as handle:
            handle.watch(watch.see)
            begin = time.perf_counter()
            last = model(
                torch.tensor([ids], device=model.device), logits_to_keep=last_row(model), use_cache=False
            ).logits[0, -1]
            seconds = time.perf_counter() - begin
            indices, notes = list(handle.stats()), handle.warnings(len(ids))
    finally:
        hook.remove()
    (hidden,) = caught
    _check_head(model, hidden[-1:], last)
    return Reading(seconds, indices, watch.sums(indices, len(ids), policy), notes, hidden)


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """What the model's head makes of hidden states, in float32."""
    config = model.config.get_text_config()
    with torch.no_grad():
        logits: Tensor = model.get_output_embeddings()(hidden).float()
    scaled = getattr(config, "logits_scaling", None)  # Granite
    logits = logits / scaled if scaled else logits
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    return torch.tanh(logits / cap) * cap if cap else logits


def _check_head(model: Any, hidden: Tensor, expected: Tensor) -> None:
    """Checks `logits_of` against the model's own last logits: some models do more to them than we know."""
    made, room = logits_of(model, hidden)[0], 0.02 * float(expected.float().abs().max())
    off = float((made - expected.float()).abs().max())
    if off > room:
        raise ValueError(
            f"{type(model).__name__} does something to its logits that closecall does not know (they are off by "
            f"{off:.3g}): texts cannot be compared on it"
        )


@dataclass(frozen=True)
class Gaps:
    """At every evaluated position: KL(dense || policy) over the vocabulary in nats, the loss under both, and whether
    their first choices agree."""

    at: Tensor  # the positions, of the token that predicts
    kl: Tensor
    loss: Tensor
    dense_loss: Tensor
    agree: Tensor

    def summary(self, tokens: int) -> dict[str, Any]:
        """Returns what is stored: means over the text, and over its parts from front to back."""
        part = (self.at * PARTS // tokens).clamp(max=PARTS - 1)

        def means(values: Tensor) -> list[float | None]:
            picked = (values[part == p] for p in range(PARTS))
            return [round(float(v.double().mean()), 6) if len(v) else None for v in picked]

        agreement = float(self.agree.double().mean())
        return {
            "score": round(agreement, 6),
            "correct": bool(self.agree.all()),
            "output": "",
            "positions": len(self.at),
            "kl": round(float(self.kl.double().mean()), 7),
            "loss": round(float(self.loss.double().mean()), 6),
            "dense_loss": round(float(self.dense_loss.double().mean()), 6),
            "agreement": round(agreement, 6),
            "kl_by_part": means(self.kl),
            "loss_change_by_part": means(self.loss - self.dense_loss),
            "agreement_by_part": means(self.agree.float()),
        }


def divergence(model: Any, dense: Tensor, other: Tensor, ids: list[int], positions: int = 0) -> Gaps:
    """Compares two readings of the same tokens at so many positions, evenly spread up to the last but one."""
    every = len(ids) - 1
    count = min(positions, every) or every
    at = torch.linspace(every - 1, 0, count).round().long().flip(0)  # the last one always
    target = torch.tensor(ids, device=dense.device)[at + 1]
    kl, loss, dense_loss, agree = [], [], [], []
    for begin in range(0, count, SLICE):
        rows, next_token = at[begin : begin + SLICE], target[begin : begin + SLICE, None]
        p = torch.log_softmax(logits_of(model, dense[rows]), -1)
        q = torch.log_softmax(logits_of(model, other[rows]), -1)
        kl.append((p.exp() * (p - q)).sum(-1).clamp(min=0))
        loss.append(-q.gather(1, next_token)[:, 0])
        dense_loss.append(-p.gather(1, next_token)[:, 0])
        agree.append(p.argmax(-1) == q.argmax(-1))
    return Gaps(at, *(torch.cat(parts).cpu() for parts in (kl, loss, dense_loss, agree)))
