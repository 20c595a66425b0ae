"""Numbers as people write them: 4K tokens, 12.3 ms, 3 min 20 s, 2 examples, 0.75 [0.30, 0.95]."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TYPES = ("fp32", "bf16", "fp16")  # that attention runs in


@dataclass(frozen=True)
class Estimate:
    """A value and its interval; n is what it is a mean of."""

    value: float
    low: float
    high: float
    n: int

    def text(self, spec: str = ".2f") -> str:
        """Leaves out the interval if there is none, as from a single context."""
        interval = "" if math.isnan(self.low) else f" [{self.low:{spec}}, {self.high:{spec}}]"
        return f"{self.value:{spec}}{interval}"

    def __str__(self) -> str:
        return self.text()


def known_mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are numbers; None where none is."""
    known = [x for x in values if x is not None and not math.isnan(x)]
    return sum(known) / len(known) if known else None


def p_text(p: float | None) -> str | None:
    """A p-value with three digits behind the point."""
    return None if p is None else "<0.001" if p < 0.0005 else f"{p:.3f}"


def size(n: int) -> str:
    """4096 as 4K."""
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


def three_digits(x: float) -> str:
    """12345.6 as 12346, 12.34 as 12.3, 0.01234 as 0.0123."""
    return f"{x:.0f}" if x >= 99.5 else f"{x:.1f}" if x >= 9.95 else f"{x:.2f}" if x >= 0.995 else f"{x:.3g}"


def duration(seconds: float) -> str:
    """200 seconds as 3 min 20 s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def plural(n: int, what: str) -> str:
    """1 thread, 2 threads."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def threads(n: int) -> str:
    return plural(n, "thread")


def mebibytes(count: int | None) -> float | None:
    return None if count is None else count / 2**20


def dtype_name(dtype: torch.dtype) -> str:
    """fp32 for torch.float32; types without a short name keep torch's."""
    from closecall.info import DTYPES

    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype).removeprefix("torch."))
