"""Many questions for one prefill: a context is read once under a policy, and every question continues its cache.

So people with prefix caching work. Three passes make an answer:

1. the context, by the policy, once: a chunk of a prompt that goes on with the longest question;
2. the question's own rows, by the policy, over the context's keys: the prompt's last chunk, however short it is;
3. the expected answer, densely, as decoding is. Greedy decoding gives it if every token is the likeliest after those
   before, so one pass over all of them tells. The answer's rows take no part in what the question's tiles keep.

Every question starts from the same keys and values: nothing of a question is left for the next.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from closecall.hf.attach import attach
from closecall.policy import policy as make_policy

from ..spine.last_row import last_row
from ..tasks.example import Asked as Continuation
from ..tasks.example import Encoded, Example, encode_ask, gold_blocks
from .kept import Asked, Prefill, Sums, Watch, mean
from .matched import Applied
from .subject import Subject


@dataclass(frozen=True)
class Outcome:
    """What came of one example: its prefill, and the answers as far as they are known."""

    prefill: Prefill
    outputs: list[str]  # one for each question
    choice: str = ""
    asked_budgets: list[float] = field(default_factory=list)  # blocks a tile of each question kept, where it is apart


def read(subject: Subject, example: Example, encoded: Encoded, applied: Applied) -> Outcome:
    """The context and all its questions."""
    loaded = subject.loaded
    model, tokens = loaded.model, len(encoded.ids)
    continued = [encode_ask(loaded.tokenizer, question) for question in example.questions]
    longest = max(len(c.ids) + len(c.answer) for c in continued)
    if tokens + longest > example.context:
        raise ValueError(
            f"{example.key}: {tokens} tokens of context and {longest} of the longest question and its answer are more "
            f"than the {example.context} there is room for: make the context shorter"
        )
    subject.check_room(tokens + longest)
    context = Watch([])
    with torch.no_grad(), attach(model, applied.policy) as handle:
        handle.watch(context.see)
        handle.prompt_len = tokens + max(len(c.ids) for c in continued)
        begin = time.perf_counter()
        cache = model(
            torch.tensor([encoded.ids], device=model.device), logits_to_keep=last_row(model), use_cache=True
        ).past_key_values
        seconds = time.perf_counter() - begin
        indices = list(handle.stats())
        notes = handle.warnings(tokens)
    layers = context.sums(indices, tokens, applied.policy)
    outputs, budgets = [], []
    for i, (question, tail) in enumerate(zip(example.questions, continued, strict=True)):
        gold = gold_blocks(example, question, encoded.offsets, applied.policy.block)
        output, asked = _ask(subject, fork(cache), tokens, tail, gold, applied, i, indices)
        outputs.append(output)
        budgets.append(round(mean([s.kept / s.tiles for s in asked]), 6))
        for layer, sums in zip(layers, asked, strict=True):
            layer.asked_triggered += sums.asked_triggered
            layer.hits += sums.hits
    return Outcome(Prefill(seconds, indices, layers, notes), outputs, asked_budgets=budgets)


def _ask(
    subject: Subject,
    cache: Any,
    tokens: int,
    tail: Continuation,
    gold: list[list[int]],
    applied: Applied,
    number: int,
    indices: Sequence[int],
) -> tuple[str, list[Sums]]:
    """The words that greedy decoding says to a question as far as they are known, and what its tiles kept."""
    model, tokenizer = subject.loaded.model, subject.loaded.tokenizer
    chosen = applied.for_question(number)
    watch = Watch([Asked(row=tokens + len(tail.ids) - 1, gold=gold)], first=tokens)
    with torch.no_grad(), attach(model, chosen, decode="sparse") as handle:  # a prompt goes on, nothing is decoded yet
        handle.watch(watch.see)
        handle.prompt_len = tokens + len(tail.ids)
        out = model(
            torch.tensor([tail.ids], device=model.device),
            past_key_values=cache,
            logits_to_keep=last_row(model),
            use_cache=True,
        )
    best = [int(out.logits[0, -1].argmax())]
    with torch.no_grad(), attach(model, make_policy("dense")):
        if best[0] == tail.answer[0]:
            out = model(torch.tensor([tail.answer], device=model.device), past_key_values=cache, use_cache=True)
            best += out.logits[0].argmax(-1).tolist()
    agreed = next((n for n, (a, b) in enumerate(zip(best, tail.answer, strict=False)) if a != b), len(tail.answer))
    sums = watch.sums(indices, tokens + len(tail.ids), chosen)
    return str(tokenizer.decode(best[: agreed + 1], skip_special_tokens=True)), sums


def fork(cache: Any) -> Any:
    """A cache that begins as this one: what is added to it does not show in the other.

    Layers that put new keys behind the earlier ones make new tensors, so they share those; others are copied.
    """
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    appending = (DynamicLayer.update, DynamicSlidingWindowLayer.update)
    branch = copy.copy(cache)
    branch.layers = [
        copy.copy(layer) if getattr(type(layer), "update", None) in appending else copy.deepcopy(layer)
        for layer in cache.layers
    ]
    return branch
