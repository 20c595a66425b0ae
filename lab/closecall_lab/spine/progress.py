"""What a command says while it works, on stderr: messages, and how far it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO, TypeVar

from .numbers import duration

T = TypeVar("T")
Say = Callable[[str], None]
LIVE, STAYING = 0.2, 30.0  # seconds between lines: on a terminal they replace each other, elsewhere they stay


def say(message: str) -> None:
    print(f"closecall: {message}", file=sys.stderr, flush=True)


def written(files: Iterable[Path]) -> None:
    say(f"written: {' '.join(map(str, files))}")


class Line:
    """One line that renews itself on a terminal; elsewhere a line now and then."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stderr
        self.live = self.out.isatty()
        self._shown = -STAYING

    def show(self, text: Callable[[], str]) -> None:
        """Shows `text()`, unless the last line is too fresh."""
        now = time.monotonic()
        if now - self._shown >= (LIVE if self.live else STAYING):
            self._shown = now
            self._print(text())

    def finish(self, text: str) -> None:
        """Shows the last line, which stays."""
        self._print(text)
        if self.live:
            print(file=self.out, flush=True)

    def _print(self, text: str) -> None:
        print(f"\r\x1b[2K{text}" if self.live else text, end="" if self.live else "\n", file=self.out, flush=True)


def countdown(items: Sequence[T], label: Callable[[T], str], guess: Callable[[T], float]) -> Iterator[T]:
    """The items one by one, each announced with about how long they all still take.

    `guess` is in seconds for the first item; afterwards only proportions count, and the clock sets the scale.
    """
    guessed = spent = 0.0
    for number, item in enumerate(items, 1):
        left = sum(map(guess, items[number - 1 :])) * (spent / guessed if guessed else 1.0)
        say(f"[{number}/{len(items)}] {label(item)} ... about {duration(left)} left")
        begin = time.perf_counter()
        yield item
        spent += time.perf_counter() - begin
        guessed += guess(item)
