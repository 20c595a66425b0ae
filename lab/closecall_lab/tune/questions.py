"""Prompts that ask something: how a policy does where text alone tells little.

Heads that look something up are idle on plain text. So a policy is also fitted on the rows that hold what a question
asks for, and judged by how likely the right answers stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from closecall import Policy, attach
from closecall.models.load import LoadedModel

from .. import tasks
from ..eval.asking import fork
from ..eval.kept import Watch, everything, mean
from ..spine.last_row import last_row
from ..tasks.example import Example, answer_tokens, encode_ask, encode_example, tokens_of
from .pieces import Piece

SEED = 7919  # no evaluation's, which people count from 0: what a policy is tuned on must not be asked again


@dataclass(frozen=True)
class Prompt(Piece):
    """A piece with questions: they continue it, or stand in it with their answers."""

    evidence: tuple[int, ...] = ()  # the positions of what the answers depend on
    asks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()  # question and answer, which continue the piece
    places: tuple[tuple[int, int], ...] = ()  # where answers stand in it

    @property
    def asking(self) -> tuple[int, ...]:
        """The piece up to the end of its first question: what a model is given before it answers."""
        return self.ids + (self.asks[0][0] if self.asks else ())


def prompts(loaded: LoadedModel, names: Sequence[str], context: int, most: int, *, seed: int = SEED) -> list[Prompt]:
    """`most` prompts of `context` tokens, of each task in turn."""
    kinds = [tasks.get(name) for name in names]
    streams = [kind.examples(loaded.tokenizer, context, most, seed, wrap=loaded.prompt) for kind in kinds]
    return [_prompt(loaded.tokenizer, example) for example in islice(_in_turn(streams), most)]


def _in_turn(streams: Sequence[Iterator[Example]]) -> Iterator[Example]:
    # Pieces alternate between fitting and judging: two of a task follow each other, so that both see every task.
    while streams:
        pairs = [list(islice(stream, 2)) for stream in streams]
        streams = [stream for stream, pair in zip(streams, pairs, strict=True) if pair]
        for pair in pairs:
            yield from pair


def _prompt(tokenizer: Any, example: Example) -> Prompt:
    encoded = encode_example(tokenizer, example)
    if not example.shared and any(question.at is None for question in example.questions):
        raise ValueError(
            f"tuning asks many questions of one prompt, and {example.task} asks one: give it more, such as questions=8"
        )
    spans = [tokens_of(span, encoded.offsets) for question in example.questions for span in question.gold]
    made = [encode_ask(tokenizer, question) for question in example.questions if question.ask]
    inside = [answer_tokens(example, question, encoded.offsets) for question in example.questions if not question.ask]
    asks = tuple((tuple(one.ids), tuple(one.answer)) for one in made)
    places = tuple((one.start, one.stop) for one in inside)
    evidence = tuple(sorted({place for span in spans for place in span}))
    return Prompt(example.key, tuple(encoded.ids), evidence, asks, places)


@dataclass(frozen=True)
class Answers:
    """For each question of a prompt: the log-probability of a token of its answer, and whether greedy decoding gives
    it. `blocks` and `share` are what the prompt's tiles kept."""

    likely: tuple[float, ...]
    right: tuple[bool, ...]
    blocks: float
    share: float

    def lost(self, dense: Answers) -> float:
        """Nats that a token of a right answer loses against dense; where dense is wrong nothing can be lost."""
        gaps = [d - own for own, d, right in zip(self.likely, dense.likely, dense.right, strict=True) if right]
        return sum(gaps) / len(gaps) if gaps else math.nan

    def kept(self, dense: Answers) -> tuple[int, int]:
        """How many of dense's right answers stay, and how many there are."""
        return sum(own and d for own, d in zip(self.right, dense.right, strict=True)), sum(dense.right)


@torch.no_grad()
def ask(model: Any, prompt: Prompt, policy: Policy) -> Answers:
    """Reads the prompt once by the policy and asks all its questions."""
    watch = Watch([])
    ids = torch.tensor([prompt.ids], device=model.device)
    longest = max((len(question) for question, _ in prompt.asks), default=0)
    with attach(model, policy) as handle:
        handle.watch(watch.see)
        handle.prompt_len = len(prompt.ids) + longest
        rows = torch.tensor([row - 1 for place in prompt.places for row in range(*place)] or [-1], device=model.device)
        read = model(ids, logits_to_keep=rows, use_cache=bool(prompt.asks))
        indices = list(handle.stats())
    layers = [watch.layers.get(i) or everything(len(prompt.ids), policy, 1, []) for i in indices]
    if prompt.asks:
        scored = [_continued(model, read.past_key_values, prompt, policy, *one) for one in prompt.asks]
    else:
        sizes = [stop - start for start, stop in prompt.places]
        answers = (ids[0, start:stop] for start, stop in prompt.places)
        scored = [_scored(*one) for one in zip(read.logits[0].split(sizes), answers, strict=True)]
    return Answers(
        likely=tuple(likely for likely, _ in scored),
        right=tuple(right for _, right in scored),
        blocks=mean([layer.kept / layer.tiles for layer in layers]),
        share=mean([layer.kept / layer.visible for layer in layers]),
    )


def _continued(
    model: Any, cache: Any, prompt: Prompt, policy: Policy, question: tuple[int, ...], answer: tuple[int, ...]
) -> tuple[float, bool]:
    """The question is the prompt's last chunk, by the policy; the answer is then read densely, as decoding is."""
    branch = fork(cache)
    with attach(model, policy, decode="sparse") as handle:
        handle.prompt_len = len(prompt.ids) + len(question)
        asked = model(
            torch.tensor([question], device=model.device), past_key_values=branch, logits_to_keep=last_row(model)
        )
    logits = [asked.logits[0]]
    if len(answer) > 1:
        with attach(model, "dense"):
            rest = model(torch.tensor([answer[:-1]], device=model.device), past_key_values=branch)
        logits.append(rest.logits[0])
    return _scored(torch.cat(logits), torch.tensor(answer, device=model.device))


def _scored(logits: Tensor, answer: Tensor) -> tuple[float, bool]:
    likely = torch.log_softmax(logits.float(), -1).gather(1, answer[:, None])
    return float(likely.mean()), bool((logits.argmax(-1) == answer).all())
