"""Backends: the same operator on different machinery. `reference` is the specification, the others must equal it.

A backend ranks the blocks of every tile, writes the kept ones as indices, and attends over them. Which blocks are kept
is the rule's business and the same code for all.
"""

from __future__ import annotations

import functools
import importlib
import math
import warnings
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..geometry import Geometry
from ..policy import Policy
from ..ranking import Ranked
from ..registry import unknown
from ..selection import Selection
from ..summaries import Summaries

MODULES = {"cpu": "cpu", "flex": "flex", "reference": "reference", "triton": "triton.backend"}
NAMES = tuple(MODULES)
PREFERRED = {"cpu": ("cpu",), "cuda": ("triton", "flex")}  # by device (ROCm calls its devices cuda too), best first


class Backend(Protocol):
    """What a backend module offers."""

    def why_not(self, q: Tensor) -> str | None:
        """Why this backend cannot run on tensors like `q`, with what to do instead; None if it can."""

    def rank(
        self, q: Tensor, k: Tensor, policy: Policy, geometry: Geometry, scale: float, summaries: Summaries | None = None
    ) -> Ranked:
        """The ranked unforced blocks of every tile, as far as the policy's rule can keep them.

        `summaries` holds block summaries of an earlier call, to go on from. The ranking is the same without: a backend
        that keeps none leaves them alone.
        """

    def gather_kept(self, ranked: Ranked, counts: Tensor, geometry: Geometry, sinks: int, width: int) -> Tensor:
        """kv_idx from a ranking and the rule's counts."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection | None, geometry: Geometry, scale: float,
        softcap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Output `[B, H, M, Dv]` in q's type and log-sum-exp `[B, H, M]`; `selection=None` means every visible block.

        A row that sees no key, padded rows among them, gets 0 and -inf.
        """


class Choice(NamedTuple):
    """A backend and why it was taken."""

    name: str
    why: str


def load(name: str) -> Backend:
    """The backend of that name, whether it can run here or not."""
    if name not in NAMES:
        raise unknown("backend", name, (*NAMES, "auto"))
    backend: Backend = importlib.import_module(f"{__name__}.{MODULES[name]}")
    return backend


def explain(q: Tensor) -> Choice:
    """Says what `backend="auto"` takes for tensors like `q`, and why."""
    problems: list[str] = []
    for name in PREFERRED.get(q.device.type, ("flex",)):
        problem = load(name).why_not(q)
        if problem is None:
            return Choice(name, "; ".join([*problems, f"{q.device.type} tensors of {q.dtype}".replace("torch.", "")]))
        problems.append(problem)
    return Choice("reference", "; ".join(problems))


@functools.cache
def _say_once(name: str, why: str) -> None:
    slow = ", which is hundreds of times slower than a kernel" if name == "reference" else ""
    warnings.warn(f"backend='auto' fell back to {name!r}{slow}: {why}", stacklevel=5)


def choose(name: str, q: Tensor) -> Backend:
    """Returns the backend of that name; for `"auto"` the best that can run, with one warning if that is a fallback."""
    if name == "auto":
        choice = explain(q)
        if choice.name != PREFERRED.get(q.device.type, ("flex",))[0]:
            _say_once(*choice)
        return load(choice.name)
    backend = load(name)
    problem = backend.why_not(q)
    if problem is not None:
        raise ValueError(f"backend {name!r} cannot run here: {problem}")
    return backend


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of rows that see nothing; of float64 calls (an oracle's) both are float64."""
    batch, heads, rows, _ = q.shape
    lse = torch.promote_types(q.dtype, torch.float32)
    return q.new_zeros(batch, heads, rows, v.shape[3]), q.new_full((batch, heads, rows), -math.inf, dtype=lse)
