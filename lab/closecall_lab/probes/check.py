"""How well a probe answers under dense attention: `python -m closecall_lab.probes.check qwen2 --out FILE`.

Every question is asked on its own after its haystack and answered by greedy decoding, one token at a time. A haystack
is read once for all its questions: they share a context, so an interval around these figures would be clustered.
With `--out` every finished context is kept, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..spine import files
from ..spine.progress import Line
from . import text
from .words import END, IDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEED = 20_000  # of the texts; no training seed comes near


@dataclass(frozen=True)
class Exam:
    """A task at one context length, with what is asked of a probe there."""

    task: str
    length: int
    target: float
    chains: int
    hops: int

    def passage(self, number: int) -> text.Passage:
        """The texts depend on the exam and their number alone, so all probes get the same."""
        rng = np.random.default_rng([SEED, self.length, self.hops, number])
        return text.passage(rng, self.length, [self.hops] * self.chains, n_questions=self.chains)


EXAMS = (
    *(Exam("needles", n, 0.98, chains=24, hops=0) for n in (1024, 4096, 8192)),
    Exam("pointer_chase", 8192, 0.97, chains=6, hops=3),
    Exam("needles", 16_384, 0.98, chains=24, hops=0),
    Exam("needles", 32_768, 0.95, chains=24, hops=0),  # takes longer than all others together
)


@dataclass
class Result:
    """How an exam is going."""

    exam: Exam
    contexts: int = 0
    questions: int = 0
    right: int = 0

    @property
    def passed(self) -> bool:
        return self.right >= self.exam.target * self.questions

    def facts(self) -> dict[str, Any]:
        counts = {"contexts": self.contexts, "questions": self.questions, "right": self.right}
        return {**asdict(self.exam), **counts, "accuracy": round(self.right / max(1, self.questions), 4)}

    def __str__(self) -> str:
        name = f"{self.exam.task:14}{self.exam.length:7} tokens"
        share = f"{self.right}/{self.questions} = {self.right / max(1, self.questions):.4f}"
        return f"{name}  {share}  wanted {self.exam.target:.2f}  {'ok' if self.passed else 'MISSED'}"


@torch.no_grad()
def answers(model: PreTrainedModel, passage: text.Passage) -> Iterator[str]:
    """What the model writes after each of a passage's questions (those at the end), each asked on its own."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    seen = len(passage.ids)
    model(input_ids=torch.from_numpy(passage.ids)[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
    for question in passage.questions:
        if extra := cache.get_seq_length() - seen:
            cache.crop(-extra)  # forget the question before
        answer: list[int] = []
        step = list(question.ids)
        while len(answer) <= len(question.answer) and (not answer or answer[-1] != IDS[END]):
            out = model(input_ids=torch.tensor([step]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            answer.append(int(out.logits[0, -1].argmax()))
            step = answer[-1:]
        yield text.words(answer)


def examine(model: PreTrainedModel, result: Result, questions: int, after: Callable[[], None]) -> None:
    """Goes on with an exam until at least so many questions were asked; `after` is called after every context."""
    while result.questions < questions:
        passage = result.exam.passage(result.contexts)
        right = sum(map(text.answered, passage.questions, answers(model, passage)))
        result.contexts += 1
        result.questions += len(passage.questions)
        result.right += right
        after()


def fingerprint(directory: Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


def _kept(out: Path, weights: str) -> list[Result]:
    """What an earlier run on the same weights found out."""
    if not out.exists():
        return [Result(exam) for exam in EXAMS]
    stored = json.loads(out.read_text())
    if stored["weights"] != weights:
        raise ValueError(f"{out} holds the results of other weights: choose another --out, or remove it")
    counts = ("contexts", "questions", "right")
    found = {Exam(**{k: v for k, v in r.items() if k in Exam.__dataclass_fields__}): r for r in stored["results"]}
    return [Result(exam, **{k: found[exam][k] for k in counts}) if exam in found else Result(exam) for exam in EXAMS]


def main(arguments: list[str] | None = None) -> int:
    from . import directory, load, names

    parser = argparse.ArgumentParser(prog="python -m closecall_lab.probes.check", description=__doc__.split("\n\n")[0])
    parser.add_argument("probe", help=f"{', '.join(names())}, or the directory of a training")
    parser.add_argument("--seed", type=int, default=0, help="which of the seeds that ship (0)")
    parser.add_argument("-n", type=int, default=400, help="questions per task and length, at least (400)")
    parser.add_argument("--longest", type=int, default=32_768, help="leave out longer contexts than this (32768)")
    parser.add_argument("--out", type=Path, help="keep the results there, as JSON, and go on from them")
    args = parser.parse_args(arguments)
    if args.n < 1:
        parser.error(f"-n must be at least 1, got {args.n}")
    if args.longest < EXAMS[0].length:
        parser.error(f"--longest must be at least {EXAMS[0].length}, the shortest context, got {args.longest}")
    try:
        where = Path(args.probe) if Path(args.probe).is_dir() else directory(args.probe, args.seed)
        weights = fingerprint(where)
        results = _kept(args.out, weights) if args.out else [Result(exam) for exam in EXAMS]
    except FileNotFoundError:
        parser.error(f"no model.safetensors in {args.probe}: has the training finished?")
    except ValueError as error:
        parser.error(str(error))
    model, _ = load(where)

    line = Line()
    for result in (wanted := [r for r in results if r.exam.length <= args.longest]):

        def after(result: Result = result) -> None:
            line.show(lambda: str(result))
            if args.out:
                asked = [r.facts() for r in results if r.questions]
                files.write(args.out, json.dumps({"weights": weights, "results": asked}, indent=1) + "\n")

        examine(model, result, args.n, after)
        line.finish(str(result))
        print(result, flush=True)
    return 0 if all(r.passed for r in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
