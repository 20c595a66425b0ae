"""lm-eval's tasks, in their official wording, on a model under a policy: `lm-eval:NAME`.

The harness loads the data, words the prompts and scores; we hand it the model with our attention attached.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from closecall.models.cache import UnavailableError

PREFIX = "lm-eval:"


@dataclass(frozen=True)
class Document:
    """What a task asks about one of its documents: the requests as lm-eval makes them, and what it compares with.

    A request is its kind (`loglikelihood`, `generate_until`) and its arguments: the text, and what is to follow it.
    """

    number: int
    requests: tuple[tuple[str, tuple[Any, ...]], ...]
    target: str
    version: str  # of the task, as its authors count

    @property
    def longest(self) -> str:
        """The longest text that the model is to read."""
        whole = ("".join(filter(_is_text, arguments)) for _, arguments in self.requests)
        return max(whole, key=len)


@dataclass(frozen=True)
class Answered:
    """How a document was answered: in words, and by every figure the task has for a single document."""

    output: str
    scores: Mapping[str, float]


class Documents:
    """One lm-eval task on one model, document by document, in lm-eval's order.

    `answer` runs the model as it is at that moment, attached or not. Few-shot examples (`shots` of them; by default as
    many as the task says) are drawn for each document from the seed and its number, so that none depends on another.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        *,
        shots: int | None = None,
        max_length: int | None = None,
        chat: bool = False,
        include_path: str | Path | None = None,
    ) -> None:
        self.name = name.removeprefix(PREFIX)
        _check(tokenizer, chat)
        manager = find(self.name, include_path)
        self._evaluator, _, huggingface = _lm_eval()
        self._loaded = manager.load([self.name])
        tasks = self._loaded["tasks"]
        if len(tasks) != 1:
            some = ", ".join(list(tasks)[:3])
            raise ValueError(f"{self.name!r} is a group of {len(tasks)} lm-eval tasks: name one of them ({some}, ...)")
        ((self._key, self._task),) = tasks.items()
        if shots is not None or self._task.get_config("num_fewshot") is None:
            self._task.set_config(key="num_fewshot", value=shots or 0)
        self.chat = chat
        with _quiet():
            self.lm = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=max_length)

    def __len__(self) -> int:
        return len(self._task.eval_docs)

    def document(self, number: int, seed: int = 0) -> Document:
        self._draw(number, seed)
        template = self.lm.apply_chat_template if self.chat else None
        with _quiet():
            self._task.build_all_requests(samples=[number], apply_chat_template=self.chat, chat_template=template)
        made = self._task.instances
        target = json.dumps(self._task.doc_to_target(made[0].doc), default=str)
        version = str(getattr(self._task, "VERSION", ""))
        return Document(number, tuple((one.request_type, one.args) for one in made), target, version)

    def answer(self, number: int, seed: int = 0) -> Answered:
        self._draw(number, seed)
        with _quiet():
            results = self._evaluator.evaluate(
                lm=self.lm,
                task_dict=self._loaded,
                samples={self._key: [number]},
                bootstrap_iters=0,
                apply_chat_template=self.chat,
            )
        # A task may read its answers through several filters: the first is the one that it is known by.
        sample = results["samples"][self._key][0]
        scores = {metric: float(sample[metric]) for metric in sample["metrics"] if isinstance(sample[metric], Real)}
        return Answered(_said(sample), scores)

    def _draw(self, number: int, seed: int) -> None:
        self._task.set_fewshot_seed(seed=seed * 1_000_003 + number)


def _is_text(argument: Any) -> bool:
    return isinstance(argument, str)


def _said(sample: Mapping[str, Any]) -> str:
    """The generated text; where continuations were weighed, the likeliest of them."""
    answers = sample["filtered_resps"]
    if _is_text(answers[0]):
        return str(answers[0])
    likely = [answer[0] for answer in answers if isinstance(answer, Sequence) and isinstance(answer[0], Real)]
    if len(likely) != len(answers):
        return json.dumps(answers, default=str)
    return str(sample["arguments"][likely.index(max(likely))][1]).strip()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences lm-eval's advice and its progress bars, one for every step of every document."""
    log = logging.getLogger("lm_eval")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        log.setLevel(before)


def _check(tokenizer: Any, chat: bool) -> None:
    if chat and getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("chat=True needs a chat template, and this tokenizer has none")
    if getattr(tokenizer, "eos_token_id", None) is None:
        raise ValueError("lm-eval ends answers with the tokenizer's end token, and this one has none: set eos_token")


def find(name: str, include_path: str | Path | None = None) -> Any:
    """lm-eval's index of tasks with `name` in it. Its own thousands are only looked through if the user's lack it."""
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"include_path must be a directory with lm-eval task files, got {str(include_path)!r}")
    _, tasks, _ = _lm_eval()
    known: list[str] = []
    if include_path is not None:
        own = tasks.TaskManager(include_defaults=False, include_path=str(include_path))
        if name in own.task_index:
            return own
        known += own.all_tasks
    installed = _installed()
    if name in installed.task_index:
        return installed
    near = difflib.get_close_matches(name, known + installed.all_tasks, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ValueError(f"unknown lm-eval task {name!r}: {hint}`lm-eval ls tasks` lists them all")


@functools.cache
def _installed() -> Any:
    """The index of lm-eval's own tasks, read once: that takes many seconds, and they do not change while we run."""
    return _lm_eval()[1].TaskManager()


def _lm_eval() -> tuple[Any, Any, Any]:
    if importlib.util.find_spec("lm_eval") is None:
        raise UnavailableError("lm-eval tasks need the lm-eval package: pip install './lab[lm-eval]'")
    modules = [importlib.import_module(f"lm_eval.{m}") for m in ("evaluator", "tasks", "models.huggingface")]
    return modules[0], modules[1], modules[2]
