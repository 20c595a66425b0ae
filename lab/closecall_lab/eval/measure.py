"""One example under one policy: a prefill by the policy, the answers, and what the selection really kept.

As in the paper, only the prefill is sparse: answers are then decoded densely over the cache. Questions whose answer
stands in the prompt are scored in the prefill itself, all of an example's in one forward pass. Questions that share a
context continue its cache (see `asking`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from closecall.hf.attach import attach
from closecall.models.load import LoadedModel
from closecall.policy import Policy

from ..tasks.base import BaseTask
from ..tasks.example import Encoded, Example, answer_tokens, encode_example, gold_blocks
from ..tasks.scoring import choice_in, choice_tokens, choose
from . import asking
from .asking import Outcome
from .kept import Asked, Prefill, Watch, mean
from .matched import Applied
from .store import Run
from .subject import Subject


def measure(subject: Subject, task: BaseTask, example: Example, policy: Policy | Applied) -> Run:
    """Runs the example under the policy and scores every question."""
    applied = policy if isinstance(policy, Applied) else Applied(policy)
    encoded = encode_example(subject.loaded.tokenizer, example)
    tokens = len(encoded.ids)
    start = time.perf_counter()
    if example.shared:
        outcome = asking.read(subject, example, encoded, applied)
    else:
        outcome = _read(subject.loaded, example, encoded, applied.policy)
    wall = time.perf_counter() - start
    answers = [_judge(task, example, i, outcome) for i in range(len(example.questions))]
    outcome.prefill.notes.extend(_too_long(subject.loaded, tokens, example))
    return outcome.prefill.run(subject, example, applied, answers, tokens, wall)


def _too_long(loaded: LoadedModel, tokens: int, example: Example) -> list[str]:
    generated = example.max_new_tokens if any(q.at is None for q in example.questions) else 0
    if loaded.context is None or tokens + generated <= loaded.context:
        return []
    return [f"{tokens + generated} tokens are more than the {loaded.context} that {loaded.own_name} was trained for"]


def _read(loaded: LoadedModel, example: Example, encoded: Encoded, policy: Policy) -> Outcome:
    """A prompt with its questions in it, or with one at its end."""
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
    with torch.no_grad(), attach(loaded.model, policy) as handle:
        handle.watch(watch.see)
        answered = _answer(loaded, example, encoded.ids, forced)
        indices, notes = list(handle.stats()), handle.warnings(tokens)
    outputs = [answered.forced.get(i, answered.generated) for i in range(len(example.questions))]
    prefill = Prefill(answered.prefill_seconds, indices, watch.sums(indices, tokens, policy), notes)
    return Outcome(prefill, outputs, answered.choice)


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
    rows = sorted({row - 1 for places in forced.values() for row in places} | ({len(ids) - 1} if generates else set()))
    begin = time.perf_counter()
    out = model(
        torch.tensor([ids], device=model.device),
        logits_to_keep=torch.tensor(rows, device=model.device),
        use_cache=generates,
    )
    best = dict(zip(rows, out.logits[0].argmax(-1).tolist(), strict=True))
    seconds = time.perf_counter() - begin
    answers = {i: str(tokenizer.decode([best[row - 1] for row in places])) for i, places in forced.items()}
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


def _judge(task: BaseTask, example: Example, i: int, outcome: Outcome) -> dict[str, Any]:
    """The score of question i, and how far its gold blocks were kept, over all layers."""
    question, output = example.questions[i], outcome.outputs[i]
    score = float(task.score(example, question, output))
    judged: dict[str, Any] = {"score": round(score, 6), "correct": score >= 1, "output": output}
    if example.choices and question.at is None:
        judged |= {"choice": outcome.choice, "choice_correct": task.score(example, question, outcome.choice) >= 1}
        judged["unformatted"] = choice_in(output, example.choices) is None
    judged["asked_triggered"] = round(mean([layer.asked_triggered[i] for layer in outcome.prefill.layers]), 4)
    if outcome.asked_budgets:
        judged["asked_budget"] = outcome.asked_budgets[i]
    flat = [block for layer in outcome.prefill.layers for span in layer.hits[i] for block in span]
    if flat:
        judged |= {"hit": round(mean(flat), 4), "hit_union": round(mean([float(x > 0) for x in flat]), 4)}
    return judged
