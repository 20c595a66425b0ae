"""Questions about real code: definitions of Python's standard library, shuffled into one long file.

Every piece of the file is a definition as it stands in the library: a function, or an assignment of a constant. Which
ones, and in which order, follows from the seed. The file comes first and every question continues it, so one prefill
serves all of them.
"""

from __future__ import annotations

import ast
import builtins
import random
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from . import corpora
from .base import TASKS, Generated, check_least
from .example import Example, Span
from .fit import Room, tail
from .hiding import Ask, fill, moved, placed

INTRO = "Below is a Python file. Read it: you will be asked about it afterwards."
MOST_LINES = 24  # of a function: longer ones leave room for too few
FEWEST_WORDS = 5  # in a description
COMMON = set(dir(builtins)) | {"self", "cls", "super"}


@dataclass(frozen=True)
class Function:
    """A function of the standard library, with what it is for and what it calls."""

    name: str
    source: str
    summary: str  # the first sentence of its docstring; empty without one
    bare: str  # the source without its docstring
    calls: frozenset[str]


@dataclass(frozen=True)
class Constant:
    """A name in capitals, what it is set to as the source has it, and the assignment."""

    name: str
    value: str
    source: str


@lru_cache(maxsize=1)
def functions() -> tuple[Function, ...]:
    """Every short function at the top of a module whose name occurs once in the library, in a fixed order."""
    listed, _ = _definitions()
    counts = Counter(f.name for f in listed)
    kept = [
        f
        for f in listed
        if counts[f.name] == 1 and f.source.count("\n") < MOST_LINES and len(f.name) > 3 and not f.name.startswith("_")
    ]
    random.Random(corpora.ORDER).shuffle(kept)
    return tuple(kept)


@lru_cache(maxsize=1)
def constants() -> tuple[Constant, ...]:
    """Every constant with a number or a string that one cannot guess, and a name that occurs once."""
    _, listed = _definitions()
    counts = Counter(c.name for c in listed)
    kept = [c for c in listed if counts[c.name] == 1]
    random.Random(corpora.ORDER).shuffle(kept)
    return tuple(kept)


@lru_cache(maxsize=1)
def _definitions() -> tuple[list[Function], list[Constant]]:
    """What the modules define at their top, in order. No tree is kept: all of them are millions of objects, and whoever
    collects garbage later would walk through them."""
    functions: list[Function] = []
    constants: list[Constant] = []
    for text in corpora.modules(packages=True).values():
        lines = text.split("\n")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                functions.append(_function(node, lines))
            elif isinstance(node, ast.Assign):
                constants.extend(_constant(node, text))
    return functions, constants


def _function(node: ast.FunctionDef, lines: list[str]) -> Function:
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    assert node.end_lineno is not None
    source, summary, bare = "\n".join(lines[first - 1 : node.end_lineno]), "", ""
    described = ast.get_docstring(node)
    if described and len(node.body) > 1:
        summary = _sentence(described)
        head, body = node.body[0], node.body[1]
        assert head.end_lineno is not None
        bare = "\n".join([*lines[first - 1 : head.lineno - 1], *lines[head.end_lineno : node.end_lineno]])
        if head.lineno == node.lineno or body.lineno == head.end_lineno:  # all on one line
            summary, bare = "", ""
    called = (call.func for call in _own(node) if isinstance(call, ast.Call))
    names = (f.id if isinstance(f, ast.Name) else f.attr if isinstance(f, ast.Attribute) else "" for f in called)
    return Function(node.name, source, summary, bare or source, frozenset(n for n in names if n and n not in COMMON))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """What is in a definition, but not in one inside it: that is another function, which calls for itself."""
    for inner in ast.iter_child_nodes(node):
        if not isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield inner
            yield from _own(inner)


def _sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.!?])\s", paragraph)[0].rstrip(".")


def _constant(node: ast.Assign, text: str) -> Iterator[Constant]:
    target, value = node.targets[0], node.value
    simple = len(node.targets) == 1 and isinstance(target, ast.Name) and isinstance(value, ast.Constant)
    if not simple or node.lineno != node.end_lineno:
        return
    assert isinstance(target, ast.Name)
    assert isinstance(value, ast.Constant)
    number = isinstance(value.value, (int, float)) and not isinstance(value.value, bool) and abs(value.value) >= 10
    word = isinstance(value.value, str) and re.fullmatch(r"[\w.:/ -]{4,24}", value.value) is not None
    word = word and _letters(str(value.value)) not in _letters(target.id)  # ROUND_UP = 'ROUND_UP' can be guessed
    if not (re.fullmatch(r"[A-Z][A-Z0-9_]{3,}", target.id) and (number or word)):
        return
    written = ast.get_source_segment(text, value)
    if written and '"""' not in written:
        yield Constant(target.id, written, f"{target.id} = {written}")


def _letters(text: str) -> str:
    return re.sub(r"\W|_", "", text).lower()


@dataclass(frozen=True, kw_only=True)
class Code(Generated):
    """`questions` things asked of one file of real code."""

    questions: int = 8

    def __post_init__(self) -> None:
        check_least(self, questions=1)

    @abstractmethod
    def draw(self, chance: random.Random) -> tuple[list[str], list[Ask], Iterator[str]]:
        """The pieces of source that the questions need, the questions, and what to fill the file with, as it comes."""

    def make(self, room: Room, context: int, key: str, chance: random.Random) -> Example:
        needed, asks, more = self.draw(chance)
        depths = [chance.random() for _ in needed]
        others: list[str] = []

        def text(n: int, words: int) -> tuple[str, list[Span]]:
            while len(others) < n:
                piece = next(more, None)
                if piece is None:
                    raise ValueError(
                        f"Python's standard library has too few definitions for {self} at {context} tokens: "
                        f"{len(others)} and the {len(needed)} asked for are all there are; use a shorter context"
                    )
                others.append(piece)
            head = f"{INTRO}\n\n```python\n"
            body, spans = placed(needed, depths, others[:n], "\n\n", [f"# {tail(words)}"] if words else [])
            return f"{head}{body}\n```\n\n", moved(spans, len(head))

        meta = {"depths": depths, **corpora.corpus("code").facts}
        return fill(str(self), text, asks, room, context, key, 0, shared=True, meta=meta, fewer="questions")


def _shuffled(listed: Sequence[Function], chance: random.Random) -> list[Function]:
    return chance.sample(listed, len(listed))


@TASKS.register("code-function")
@dataclass(frozen=True, kw_only=True)
class CodeFunction(Code):
    """Which function does what the description says? The description is the first sentence of its docstring.

    Docstrings stand in the file, as they do in real code; with `bare` they are left out, and the description has to be
    understood.
    """

    bare: bool = False

    def draw(self, chance: random.Random) -> tuple[list[str], list[Ask], Iterator[str]]:
        drawn = _shuffled([f for f in functions() if f.summary], chance)
        asked: list[Function] = []
        described: set[str] = set()  # nothing else in the file may fit a description that is asked for
        for function in drawn:
            if len(asked) < self.questions and _tells(function) and _letters(function.summary) not in described:
                asked.append(function)
                described.add(_letters(function.summary))
        asks = [
            Ask(
                f"Which function in the file does this: {f.summary}? Answer with its name alone.",
                "The name of the function is `",
                (f.name,),
                [i],
            )
            for i, f in enumerate(asked)
        ]
        sources = (f.bare if self.bare else f.source for f in drawn if _letters(f.summary) not in described)
        return [f.bare if self.bare else f.source for f in asked], asks, sources


def _tells(function: Function) -> bool:
    """Whether the description says what the function is for, and its name cannot be guessed from it."""
    said, words = _letters(function.summary), re.findall(r"\w+", function.summary)
    parts = [part for part in function.name.lower().split("_") if part]
    return len(words) >= FEWEST_WORDS and not all(part in said for part in parts)


@TASKS.register("code-constant")
@dataclass(frozen=True, kw_only=True)
class CodeConstant(Code):
    """What is a constant set to? Constants stand alone between functions, `others` more of them for each asked one."""

    others: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, others=0)

    def draw(self, chance: random.Random) -> tuple[list[str], list[Ask], Iterator[str]]:
        drawn = chance.sample(constants(), self.questions * (1 + self.others))
        names = [c.name for c in drawn]
        asks = [
            Ask(f"What is `{c.name}` set to in the file?", f"`{c.name}` is set to `", (c.value,), [i])
            for i, c in enumerate(drawn[: self.questions])
        ]
        fillers = (f.source for f in _shuffled(functions(), chance) if not any(n in f.source for n in names))
        return [c.source for c in drawn], asks, fillers


@TASKS.register("code-caller")
@dataclass(frozen=True, kw_only=True)
class CodeCaller(Code):
    """Which function calls another? The other one is called nowhere else in the file."""

    def draw(self, chance: random.Random) -> tuple[list[str], list[Ask], Iterator[str]]:
        asked: list[tuple[Function, str]] = []
        drawn = _shuffled(functions(), chance)
        for function in drawn:
            if len(asked) == self.questions:
                break
            taken = [f for f, _ in asked]
            named = sorted(
                c
                for c in function.calls
                if len(c) > 4 and not _alike(c, function.name) and not any(_mentions(f.source, c) for f in taken)
            )
            if named and not any(_mentions(function.source, called) for _, called in asked):
                asked.append((function, chance.choice(named)))
        names = {f.name for f, _ in asked}
        called = [c for _, c in asked]
        asks = [
            Ask(
                f"Which function in the file calls `{callee}`? Answer with its name alone.",
                f"The function that calls `{callee}` is `",
                (f.name,),
                [i],
            )
            for i, (f, callee) in enumerate(asked)
        ]
        fillers = (f.source for f in drawn if f.name not in names and not any(_mentions(f.source, c) for c in called))
        return [f.source for f, _ in asked], asks, fillers


def _alike(one: str, other: str) -> bool:
    """Whether one name could be guessed from the other."""
    a, b = _letters(one), _letters(other)
    return a in b or b in a


def _mentions(source: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", source) is not None
