"""How far a run is: one line that renews itself on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TextIO

from ..spine.numbers import duration
from ..spine.progress import Line
from .executors import Result
from .grid import Grid


class Progress:
    """Running score (of texts: agreement with dense) and time left, for one model."""

    def __init__(self, grid: Grid, model: str, *, jobs: int = 1, out: TextIO | None = None) -> None:
        self._line = Line(out)
        self.model = model
        self.jobs = jobs
        places = Counter(context for _, context in grid.places)
        self.per_context = {context: tasks * grid.n * len(grid.variants) for context, tasks in places.items()}
        self.total = sum(self.per_context.values())
        self.done: dict[int, int] = defaultdict(int)  # by context
        self.seconds: dict[int, list[float]] = defaultdict(list)
        self.scores: dict[str, list[float]] = defaultdict(list)

    def add(self, result: Result) -> None:
        self.done[result.job.context] += 1
        if result.run is not None:
            self.seconds[result.job.context].append(result.run.wall)
            name = str(result.spec) + (f"@{result.budget}" if result.budget else "")
            self.scores[name] += [a["score"] for a in result.run.answers]
        self._line.show(self.line)

    def left(self) -> float | None:
        """Seconds, from what runs of each context took; a context not yet seen costs in proportion to its length."""
        means = {c: sum(s) / len(s) for c, s in self.seconds.items() if s}
        if not means:
            return None
        rates = [m / c for c, m in means.items() if c]  # documents of their own lengths tell nothing of others
        per_token = sum(rates) / len(rates) if rates else 0.0
        rest = ((c, runs - self.done[c]) for c, runs in self.per_context.items())
        return sum(n * means.get(c, c * per_token) for c, n in rest) / self.jobs

    def line(self) -> str:
        left = self.left()
        time_left = f", about {duration(left)} left" if left is not None else ""
        scores = "  ".join(f"{name} {sum(s) / len(s):.2f}" for name, s in self.scores.items() if s)
        return f"{self.model}: {sum(self.done.values())}/{self.total} runs{time_left}   {scores}".rstrip()

    def finish(self) -> None:
        self._line.finish(self.line())
