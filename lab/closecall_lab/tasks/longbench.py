"""LongBench v1 (question answering, F1) and v2 (multiple choice), from the hub or from a file of the same columns.

The data is theirs, the wording of the prompts is ours; lm-eval's tasks have the official one.
"""

from __future__ import annotations

import dataclasses
import random
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from closecall.registry import unknown

from . import files
from .base import TASKS, BaseTask, check_counts
from .example import JSON, Example, Question, Span, Wrap
from .fit import Room, most
from .scoring import best_f1, choice_in

LETTERS = ("A", "B", "C", "D")
CUT = "\n\n[...]\n\n"  # stands where the middle of a document was
LENGTHS = ("short", "medium", "long")
DIFFICULTIES = ("easy", "hard")
HOPS = re.compile(r"(\d+)hop\d*__")  # how MuSiQue writes the number of hops into its ids


@dataclass(frozen=True)
class Item:
    """One question about one document, before the document is cut to size. `gold` are spans of the document."""

    id: str
    document: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[Span, ...] = ()
    meta: Mapping[str, JSON] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class FromData(BaseTask):
    """A task whose examples come from a data set, in an order drawn from the seed.

    `data` is a JSON, JSON Lines, Parquet or zip file, or a data set's name on the hub. There are as many examples as
    there are rows that pass the filters, and no more. A document that is too long loses its middle; a short one is not
    filled up, so its prompt is shorter than the context.
    """

    data: str = ""
    multiple_choice: ClassVar[bool] = False
    max_new_tokens: ClassVar[int]

    @abstractmethod
    def rows(self) -> tuple[files.Rows, Sequence[int]]:
        """The data, and which of its rows pass the filters."""

    @abstractmethod
    def item(self, row: Mapping[str, Any]) -> Item: ...

    @abstractmethod
    def asks(self, document: str, question: str) -> tuple[str, int]:
        """The text of the prompt, and where in it the document begins."""

    @property
    def label(self) -> str:
        """What examples are filed under: the task without the place of its data."""
        return self.written(without="data")

    def examples(
        self, tokenizer: Any, context: int, n: int, seed: int, *, wrap: Wrap | None = None
    ) -> Iterator[Example]:
        check_counts(context, n, seed)
        room = Room(tokenizer, wrap=wrap, chat=self.chat, multiple_choice=self.multiple_choice)
        rows, chosen = self.rows()
        order = list(chosen)
        random.Random(f"{self.label}/seed{seed}").shuffle(order)
        for i in order[:n]:
            item = self.item(rows[i])
            yield self._example(item, room, context, f"{self.label}/{context}/{item.id}")

    def _example(self, item: Item, room: Room, context: int, key: str) -> Example:
        target = context - self.max_new_tokens

        def asked(document: str) -> tuple[str, int]:
            text, inside = self.asks(document, item.question)
            prompt, begin = room.prompt(text)
            return prompt, begin + inside

        prompt, begin = asked(item.document)
        size = room.count(prompt)
        gold: tuple[Span, ...] = item.gold
        cut = size > target
        if cut:
            tokens = room.offsets(item.document)
            least = room.count(asked(CUT)[0])
            if least > target:
                raise ValueError(
                    f"{key} needs a context of at least {least + self.max_new_tokens} tokens for its question alone, "
                    f"got {context}"
                )
            kept = most(lambda k: room.count(asked(_cut(item.document, tokens, k)[0])[0]), target, guess=target - least)
            document, head, moved = _cut(item.document, tokens, kept)
            prompt, begin = asked(document)
            size = room.count(prompt)
            inside = (
                (s, e) if e <= head else (s - moved, e - moved)
                for s, e in gold
                if e <= head or s - moved >= head + len(CUT)
            )
            gold = tuple(inside)
        return Example(
            task=str(self),
            key=key,
            context=context,
            prompt=prompt,
            questions=(Question(item.answers, tuple((begin + s, begin + e) for s, e in gold)),),
            max_new_tokens=self.max_new_tokens,
            choices=LETTERS if self.multiple_choice else (),
            meta={"prompt_tokens": size, "cut": cut, "lost_gold": len(item.gold) - len(gold), **item.meta},
            templated=room.templated,
        )


def _cut(document: str, tokens: Sequence[Span], kept: int) -> tuple[str, int, int]:
    """The document's first and last tokens, `kept` in all; where its first half ends; by how much the second moved.

    Characters move to smaller places: one at p of the old document's second half is at p - moved in the new.
    """
    kept = min(kept, len(tokens))
    back = kept // 2
    head = tokens[kept - back - 1][1] if kept else 0
    begin = tokens[len(tokens) - back][0] if back else len(document)
    # Tokens of one character may share it, so the halves of a nearly whole document can touch.
    begin = max(begin, head)
    return document[:head] + CUT + document[begin:], head, begin - head - len(CUT)


@dataclass(frozen=True, kw_only=True)
class LongBenchV1(FromData):
    """One of the question-answering subsets of LongBench v1; the score is LongBench's F1."""

    subset: ClassVar[str]
    kind: ClassVar[str]
    columns: ClassVar[tuple[str, ...]] = ("_id", "context", "input", "answers")
    rule: ClassVar[str] = "Answer in as few words as you can, and write nothing but the answer."

    def rows(self) -> tuple[files.Rows, Sequence[int]]:
        rows = files.rows(self.data or files.HUB_V1, self.columns, member=f"data/{self.subset}.jsonl")
        return rows, range(len(rows))

    def item(self, row: Mapping[str, Any]) -> Item:
        return Item(str(row["_id"]), str(row["context"]), str(row["input"]).strip(), tuple(row["answers"]))

    def asks(self, document: str, question: str) -> tuple[str, int]:
        intro = f"Read the {self.kind} below, then answer the question about it.\n\n"
        return f"{intro}{document}\n\n{self.rule}\nQuestion: {question}\nAnswer:", len(intro)

    def score(self, example: Example, question: Question, output: str) -> float:
        return best_f1(question.answers, output)


@TASKS.register("longbench-narrativeqa")
@dataclass(frozen=True, kw_only=True)
class NarrativeQA(LongBenchV1):
    subset: ClassVar[str] = "narrativeqa"
    kind: ClassVar[str] = "story or script"
    max_new_tokens: ClassVar[int] = 128


@TASKS.register("longbench-qasper")
@dataclass(frozen=True, kw_only=True)
class Qasper(LongBenchV1):
    subset: ClassVar[str] = "qasper"
    kind: ClassVar[str] = "scientific article"
    max_new_tokens: ClassVar[int] = 128
    rule: ClassVar[str] = (
        f'{LongBenchV1.rule} If the article does not say, write "unanswerable"; to a yes-or-no question, '
        'write "yes" or "no".'
    )


@TASKS.register("longbench-musique")
@dataclass(frozen=True, kw_only=True)
class Musique(LongBenchV1):
    """MuSiQue, all of it or the questions of `hops` hops.

    LongBench's own ids do not tell the hops. A file of MuSiQue itself does, in its ids, and tells the supporting
    paragraphs too, which become the gold spans.
    """

    subset: ClassVar[str] = "musique"
    kind: ClassVar[str] = "passages"
    max_new_tokens: ClassVar[int] = 32
    hops: int | None = None

    def rows(self) -> tuple[files.Rows, Sequence[int]]:
        rows = files.rows(self.data or files.HUB_V1, (), member=f"data/{self.subset}.jsonl")
        own = "paragraphs" in rows.columns
        rows.need(("id", "paragraphs", "question", "answer") if own else self.columns)
        if self.hops is None:
            return rows, range(len(rows))
        if "hops" in rows.columns:
            by_row = [None if hops is None else int(hops) for hops in rows.column("hops")]
        else:
            by_row = [_hops(str(name)) for name in rows.column("id" if own else "_id")]
        there = sorted({hops for hops in by_row if hops is not None})
        if not there:
            raise ValueError(
                f"{rows.source} does not tell how many hops a question takes: give data=FILE with MuSiQue's own ids "
                f"(2hop__...) or a column hops, or leave hops out"
            )
        if self.hops not in there:
            raise ValueError(f"{rows.source} has no questions of {self.hops} hops: there are {there}")
        return rows, [i for i, hops in enumerate(by_row) if hops == self.hops]

    def item(self, row: Mapping[str, Any]) -> Item:
        found = _of_musique(row) if "paragraphs" in row else super().item(row)
        hops = row["hops"] if row.get("hops") is not None else _hops(found.id)
        return dataclasses.replace(found, meta={"hops": hops})


def _hops(name: str) -> int | None:
    match = HOPS.match(name)
    return int(match.group(1)) if match else None


def _of_musique(row: Mapping[str, Any]) -> Item:
    document, gold = "", []
    for number, paragraph in enumerate(row["paragraphs"], 1):
        piece = f"Passage {number}: {paragraph['title'].strip()}\n{paragraph['paragraph_text'].strip()}"
        if paragraph.get("is_supporting"):
            gold.append((len(document), len(document) + len(piece)))
        document += piece + "\n\n"
    answers = (str(row["answer"]), *map(str, row.get("answer_aliases") or ()))
    return Item(str(row["id"]), document.rstrip(), str(row["question"]).strip(), answers, tuple(gold))


@TASKS.register("longbench-v2")
@dataclass(frozen=True, kw_only=True)
class LongBenchV2(FromData):
    """Multiple choice. `length` and `difficulty` choose among the rows by the data set's own columns; `all` takes all.

    The generated answer is scored by the letter it settles on, 0 if there is none. The runner may score the letters'
    logits instead: `choice_tokens` and `choose`, with the chosen letter as the output.
    """

    multiple_choice: ClassVar[bool] = True
    max_new_tokens: ClassVar[int] = 32
    columns: ClassVar[tuple[str, ...]] = (
        "_id", "context", "question", "choice_A", "choice_B", "choice_C", "choice_D", "answer", "length", "difficulty",
    )  # fmt: skip
    length: str = "all"
    difficulty: str = "all"

    def __post_init__(self) -> None:
        for name, value, known in (("length", self.length, LENGTHS), ("difficulty", self.difficulty, DIFFICULTIES)):
            if value not in (*known, "all"):
                raise unknown(f"{name} of task {self.name!r}", value, (*known, "all"))

    def rows(self) -> tuple[files.Rows, Sequence[int]]:
        rows = files.rows(self.data or files.HUB_V2, self.columns)
        kinds = zip(rows.column("length"), rows.column("difficulty"), strict=True)
        chosen = [
            i
            for i, (length, difficulty) in enumerate(kinds)
            if self.length in ("all", length) and self.difficulty in ("all", difficulty)
        ]
        if not chosen:
            raise ValueError(f"{rows.source} has no rows of length {self.length} and difficulty {self.difficulty}")
        for i, answer in enumerate(rows.column("answer")):
            if str(answer).strip() not in LETTERS:
                raise ValueError(f"row {i} of {rows.source} has the answer {answer!r}, not one of {', '.join(LETTERS)}")
        return rows, chosen

    def item(self, row: Mapping[str, Any]) -> Item:
        choices = "\n".join(f"({letter}) {str(row[f'choice_{letter}']).strip()}" for letter in LETTERS)
        question = f"Question: {str(row['question']).strip()}\n{choices}"
        meta: dict[str, JSON] = {"length": row["length"], "difficulty": row["difficulty"]}
        return Item(str(row["_id"]), str(row["context"]), question, (str(row["answer"]).strip(),), (), meta)

    def asks(self, document: str, question: str) -> tuple[str, int]:
        intro = "Read the document below, then choose the right answer to the question about it.\n\n"
        rule = "Answer with one line in exactly this form, a letter for X: The correct answer is (X)"
        return f"{intro}{document}\n\n{question}\n\n{rule}", len(intro)

    def score(self, example: Example, question: Question, output: str) -> float:
        return float(choice_in(output, example.choices) == question.answers[0])
