"""lm-eval's tasks in a grid: `lm-eval:NAME` is one example for each document, answered and scored by lm-eval itself.

Its documents have their own lengths, so contexts do not apply: 0 stands in their place. A document may take several
passes over the model (one for each choice, say); what they kept is counted together.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from closecall import overrides
from closecall.hf.attach import attach
from closecall.policy import Policy
from closecall.registry import unknown
from closecall.selection import Selection

from ..tasks.base import read_options
from ..tasks.example import Example, Question
from . import lm_eval
from .kept import Asked, Prefill, Sums, Watch, mean
from .matched import Applied
from .store import Run
from .subject import Subject

OWN_LENGTHS = 0  # the context of documents that have their own


@dataclass(frozen=True)
class LmEval:
    """A task of lm-eval as it is asked for: `lm-eval:NAME`, `lm-eval:NAME,shots=5,metric=acc_norm`.

    `shots`: so many solved examples in front (as many as the task says). `chat`: through the chat template. `metric`:
    the figure that counts (the task's first). `include`: a directory with task files of one's own.
    """

    task: str
    shots: int | None = None
    chat: bool = False
    metric: str = ""
    include: str = ""
    own_lengths: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.shots is not None and self.shots < 0:
            raise ValueError(f"shots of {self.task} must be a whole number of at least 0, got {self.shots}")

    def check(self) -> None:
        """Raises an error with the near match if lm-eval has no such task."""
        lm_eval.find(self.task, self.include or None)

    def on(self, subject: Subject) -> Harness:
        return Harness(self, subject)

    @classmethod
    def parse(cls, text: str) -> LmEval:
        task, _, options = text.removeprefix(lm_eval.PREFIX).partition(",")
        if not task or "=" in task:
            raise ValueError(f"a task of lm-eval is written {lm_eval.PREFIX}NAME,option=value, got {text!r}")
        return cls(task, **read_options(cls, lm_eval.PREFIX + task, overrides.split(options, text)))

    def __str__(self) -> str:
        return self._written() + (f",include={self.include}" if self.include else "")

    def _written(self) -> str:
        """Writes the task without the place of its file, which says nothing about what is asked."""
        options = [] if self.shots is None else [f"shots={self.shots}"]
        options += ["chat=yes"] if self.chat else []
        options += [f"metric={self.metric}"] if self.metric else []
        return ",".join([lm_eval.PREFIX + self.task, *options])


class Harness:
    """A task of lm-eval on one model."""

    def __init__(self, asked: LmEval, subject: Subject) -> None:
        self.asked = asked
        self.subject = subject
        loaded = subject.loaded
        self.documents = lm_eval.Documents(
            asked.task,
            loaded.model,
            loaded.tokenizer,
            shots=asked.shots,
            max_length=loaded.context,
            chat=asked.chat,
            include_path=asked.include or None,
        )
        self._places: dict[str, tuple[int, int]] = {}  # by an example's digest: its number and seed

    def examples(self, context: int, seed: int) -> Iterator[Example]:
        """One for each document, whatever the context. The same content is the same example, whatever the seed."""
        task = self.asked._written()
        for number in range(len(self.documents)):
            document = self.documents.document(number, seed)
            requests = json.dumps(document.requests, sort_keys=True, default=str)
            example = Example(
                task=task,
                key=f"{task}/{number}",
                context=OWN_LENGTHS,
                prompt=document.longest,
                questions=(Question((document.target,)),),
                max_new_tokens=0,
                meta={"requests": hashlib.sha256(requests.encode()).hexdigest(), "version": document.version},
                templated=self.asked.chat,
            )
            self._places[example.digest()] = (number, seed)
            yield example

    def measure(self, example: Example, applied: Applied) -> Run:
        """Has lm-eval answer and score the document while the policy is attached."""
        model, policy = self.subject.loaded.model, applied.policy
        passes = Passes(policy)
        start = time.perf_counter()
        with torch.no_grad(), attach(model, policy) as handle, passes.of(model):
            handle.watch(passes.see)
            answered = self.documents.answer(*self._places[example.digest()])
            indices = list(handle.stats())
        wall = time.perf_counter() - start
        if not passes.lengths:
            raise ValueError(f"{example.key} gave the model nothing to read, so there is nothing to measure")
        longest = max(passes.lengths)
        layers = passes.layers(indices, model.config.get_text_config().num_attention_heads)
        prefill = Prefill(passes.seconds, indices, layers, handle.warnings(longest) + self._cut(example))
        metric, score = self._figure(answered)
        answer = {
            "score": round(score, 6),
            "correct": score >= 1,
            "output": answered.output,
            "metric": metric,
            "asked_triggered": round(mean([s.asked_triggered[0] for s in layers]), 4),
        }
        return prefill.run(self.subject, example, applied, [answer], longest, wall)

    def _figure(self, answered: lm_eval.Answered) -> tuple[str, float]:
        """The metric that counts, and its value. Tasks write -1 where a metric says nothing about a document."""
        scores = {name: value for name, value in answered.scores.items() if value >= 0}
        name = self.asked.metric or next(iter(scores), "")
        if not name:
            raise ValueError(f"{self.asked} has no figure for a single document, such as acc: it cannot be paired")
        if name not in scores:
            raise unknown(f"metric of {self.asked}", name, scores)
        if scores[name] > 1:
            raise ValueError(f"{name} of {self.asked} is {scores[name]:g}: only figures from 0 to 1 can be compared")
        return name, scores[name]

    def _cut(self, example: Example) -> list[str]:
        """lm-eval takes away the beginning of a prompt that is too long, and says so only in its log."""
        loaded = self.subject.loaded
        tokens = len(loaded.tokenizer(example.prompt, add_special_tokens=False, verbose=False)["input_ids"])
        room = int(self.documents.lm.max_length)
        if tokens <= room:
            return []
        return [f"{tokens} tokens are more than the {room} of {loaded.own_name}: lm-eval cut the prompt's beginning"]


class Passes:
    """Every prefill of a document: how long it was, and what its selections kept. Decoding steps do not count."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.lengths: list[int] = []
        self.seconds = 0.0
        self._watches: list[Watch] = []
        self._begun = 0.0

    @contextmanager
    def of(self, model: Any) -> Iterator[None]:
        hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, with_kwargs=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rows = _rows(args, kwargs)
        if rows > 1:
            self.lengths.append(rows)
            self._watches.append(Watch([Asked(row=rows - 1, gold=[])]))
        self._begun = time.perf_counter()

    def _end(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
        if _rows(args, kwargs) > 1:
            self.seconds += time.perf_counter() - self._begun

    def see(self, layer: int, selection: Selection) -> None:
        self._watches[-1].see(layer, selection)

    def layers(self, indices: Sequence[int], heads: int) -> list[Sums]:
        """The sums of each layer over all passes. One that made no selection left nothing out."""
        passes = zip(self._watches, self.lengths, strict=True)
        sums = [watch.sums(indices, length, self.policy, heads) for watch, length in passes]
        return [_together(of_layer) for of_layer in zip(*sums, strict=True)]


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    ids = args[0] if args else kwargs["input_ids"]
    return int(ids.shape[1])


def _together(parts: Sequence[Sums]) -> Sums:
    return Sums(
        kept=sum(p.kept for p in parts),
        visible=sum(p.visible for p in parts),
        tiles=sum(p.tiles for p in parts),
        cut=sum(p.cut for p in parts),
        triggered=sum(p.triggered for p in parts),
        last_triggered=mean([p.last_triggered for p in parts]),
        asked_triggered=[mean([p.asked_triggered[0] for p in parts])],
        hits=[[]],
    )
