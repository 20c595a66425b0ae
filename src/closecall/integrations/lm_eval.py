"""lm-eval's tasks, in their official wording, on a model under a policy: `lm-eval:NAME`.

The harness loads the data, words the prompts and scores; we hand it the model with our attention attached.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from ..policy import Policy
from .cache import UnavailableError
from .transformers import attach

PREFIX = "lm-eval:"


@dataclass(frozen=True)
class Sample:
    """One document of a task and its scores, so that policies can be compared document by document."""

    task: str
    document: int
    digest: str
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Result:
    """What lm-eval says: its figures by task and metric (`acc,none`), and the single documents behind them."""

    name: str
    policy: Policy | None
    scores: Mapping[str, Mapping[str, float]]
    samples: tuple[Sample, ...]


def is_lm_eval(name: str) -> bool:
    return name.startswith(PREFIX)


def run(
    name: str,
    model: Any,
    tokenizer: Any,
    policy: Policy | None = None,
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 1,
    max_length: int | None = None,
    chat: bool = False,
    include_path: str | Path | None = None,
    seed: int = 0,
) -> Result:
    """Runs an lm-eval task or group, with or without its prefix, on a transformers model.

    With a `policy`, that is attached for as long as it takes; without one the model runs as it is, which may be with a
    policy that the caller attached. `limit` takes the first so many documents of each task, `max_length` is the model's
    context if its configuration does not say, `chat` applies the tokenizer's chat template, and `include_path` is a
    directory with task files of one's own. A task of the hub needs a network, or the hub's local cache.

    >>> run("lm-eval:niah_single_1", model, tokenizer, closecall.policy("router-on-quest"), limit=50)  # doctest: +SKIP
    """
    name = name.removeprefix(PREFIX)
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, or None for all documents, got {limit}")
    if chat and getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("chat=True needs a chat template, and this tokenizer has none")
    if getattr(tokenizer, "eos_token_id", None) is None:
        raise ValueError("lm-eval ends answers with the tokenizer's end token, and this one has none: set eos_token")
    if include_path is not None and not Path(include_path).is_dir():
        raise ValueError(f"include_path must be a directory with lm-eval task files, got {str(include_path)!r}")
    evaluator, tasks, huggingface = _lm_eval()
    manager = _manager(tasks, name, include_path)
    wrapped = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length)
    with attach(model, policy) if policy is not None else contextlib.nullcontext():
        found = evaluator.simple_evaluate(
            model=wrapped,
            tasks=[name],
            num_fewshot=num_fewshot,
            limit=limit,
            bootstrap_iters=0,  # intervals are ours to compute, over the samples
            apply_chat_template=chat,
            task_manager=manager,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    return Result(name, policy, _scores(found["results"]), _samples(found["samples"]))


def _manager(tasks: Any, name: str, include_path: str | Path | None) -> Any:
    """lm-eval's index of tasks with `name` in it. Its own thousands are only looked through if the user's lack it."""
    own = {} if include_path is None else {"include_path": str(include_path)}
    for defaults in (False, True) if own else (True,):
        manager = tasks.TaskManager(include_defaults=defaults, **own)
        if name in manager.task_index:
            return manager
    near = difflib.get_close_matches(name, manager.all_tasks, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ValueError(f"unknown lm-eval task {name!r}: {hint}`lm-eval ls tasks` lists them all")


def _scores(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The figures alone: lm-eval puts names and absent standard errors among them."""
    return {
        task: {key: float(value) for key, value in told.items() if "," in key and isinstance(value, Real)}
        for task, told in results.items()
    }


def _samples(samples: Mapping[str, list[Mapping[str, Any]]]) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            task,
            int(one["doc_id"]),
            str(one["doc_hash"]),
            {metric: float(one[metric]) for metric in one["metrics"] if isinstance(one[metric], Real)},
        )
        for task, many in samples.items()
        for one in sorted(many, key=lambda one: int(one["doc_id"]))
    )


def _lm_eval() -> tuple[Any, Any, Any]:
    if importlib.util.find_spec("lm_eval") is None:
        raise UnavailableError("lm-eval tasks need the lm-eval package: pip install 'closecall[lm-eval]'")
    modules = [importlib.import_module(f"lm_eval.{m}") for m in ("evaluator", "tasks", "models.huggingface")]
    return modules[0], modules[1], modules[2]
