"""The operator over paged keys and values, for engines: `select`, `attend`, `attention`, and kept block summaries.

What `closecall.attention` is to tensors, `paged.attention` is to an engine's cache: any mix of whole prompts, chunks of
prompts and decoding steps in one call, keys and values read where they lie, in any strides. On CPU the result equals
the contiguous operator's bit for bit, and does not depend on how prompts were cut (see `closecall.chunks`). The same
holds for Triton's kernels, except for rows that attend to everything: there few rows run another kernel than many.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import backends
from .api import check_room, covers_everything
from .backends import paged_reference
from .checks import DTYPES, check_scale, check_softcap
from .chunks import chunk_proof, is_chunk_proof, protected_tiles
from .geometry import Geometry
from .pages import Pages, Plan
from .placed import placed
from .policy import Policy, as_policy
from .ranking import AllHeads, Ranked, alone
from .registry import unknown
from .selection import Selection, select_all

__all__ = ["PageSummaries", "Pages", "attend", "attention", "chunk_proof", "select"]

MODULES = {"cpu": "paged_cpu", "reference": "paged_reference", "triton": "triton.paged"}
NAMES = ("auto", *MODULES)


class PageSummaries:
    """The block summaries of one layer's pages. Made once; every call with it keeps it up to date.

    The contract: every step that writes keys into the pages passes these summaries once to `select`, `attention` or
    `update`, with the same policy. The summary of a block is written when a row completes it. So pages that are freed
    and used again need no care: their blocks are complete only after they were written again.

    Summaries belong to one backend, the one that `backend` means at their first use. Calls on another backend do not
    read them, but keep them up to date.
    """

    def __init__(self, policy: Policy, backend: str = "auto") -> None:
        self.policy = policy
        self.backend = backend
        self._store: Tensor | None = None
        self._of: tuple[Any, ...] = ()  # what pages, and how their summaries lie

    @property
    def nbytes(self) -> int:
        return 0 if self._store is None else self._store.nbytes

    def store(self, q: Tensor, k_pages: Tensor, geometry: Geometry, plan: Plan) -> Tensor:
        """What the backend keeps for all pages."""
        if self._store is None:
            self.backend = _resolved(self.backend, q)
            self._store = _load(self.backend).new_store(q, k_pages, self.policy, geometry, plan)
            self._of = self._kind(k_pages)
        if self._of != (kind := self._kind(k_pages)):
            raise ValueError(
                f"these summaries are of k_pages {_named(self._of)}, but now they are {_named(kind)}: make new ones "
                "for other pages"
            )
        return self._store

    def _kind(self, k_pages: Tensor) -> tuple[Any, ...]:
        return k_pages.shape, k_pages.dtype, k_pages.device, _load(self.backend).store_kind()

    def reserve(self, k_pages: Tensor, heads: int) -> None:
        """Takes the memory for all pages and `heads` query heads now, not at the first step."""
        one = Pages(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1]), torch.tensor([1]))
        plan = one.plan(k_pages.shape[2], self.policy.block, self.policy.tile)
        q = k_pages.new_empty(1, heads, 1, k_pages.shape[3])
        assert plan.chosen is not None
        if _load(_resolved(self.backend, q)).has_kernel(self.policy, k_pages.shape[3]):
            self.store(q, k_pages, plan.chosen, plan)

    def update(self, q: Tensor, k_pages: Tensor, pages: Pages) -> None:
        """For steps that select nothing: summarises the step's keys. `q [M, H, D]` only says how many heads."""
        plan = pages.plan(k_pages.shape[2], self.policy.block, self.policy.tile)
        for geometry in (plan.chosen, plan.dense):
            self._complete(_four(q), k_pages, geometry, plan)

    def _complete(self, q: Tensor, k_pages: Tensor, geometry: Geometry | None, plan: Plan) -> None:
        if geometry is None or not _ends_a_block(geometry, self.policy.block):
            return
        machine = _load(_resolved(self.backend, q))
        if machine.has_kernel(self.policy, k_pages.shape[3]):
            machine.update(q, k_pages, self.policy, geometry, plan, self.store(q, k_pages, geometry, plan))


def _named(kind: tuple[Any, ...]) -> str:
    shape, *others = kind
    return f"{list(shape)} ({', '.join(str(x) for x in others if x)})"


def _ends_a_block(geometry: Geometry, block: int) -> bool:
    """Whether some row is the last of its block. Every layer of a step asks."""
    return placed(
        geometry,
        geometry.pos.device,
        ("ends a block", block),
        lambda: bool((geometry.end // block > geometry.pos // block).any()),
    )


def _four(q: Tensor) -> Tensor:
    """`[1, H, M, D]` from `[M, H, D]`, without a copy."""
    return q.transpose(0, 1).unsqueeze(0)


def _check(q: Tensor, pages: Pages, **paged: Tensor) -> None:
    tensors = {"q": q, **paged}
    for name, x in tensors.items():
        dims = 3 if name == "q" else 4
        if not isinstance(x, Tensor) or x.ndim != dims:
            what = "[rows, heads, dim]" if dims == 3 else "[pages, heads, page, dim]"
            raise ValueError(f"{name} must be {what}, got {list(getattr(x, 'shape', ())) or type(x).__name__}")
        if x.dtype != q.dtype or x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype} and q {q.dtype}: use one type, float32, bfloat16 or float16")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}: move them to one device")
    if not isinstance(pages, Pages):
        raise TypeError(f"pages must be a closecall.paged.Pages, got {type(pages).__name__}")
    if q.shape[0] != pages.bounds[-1]:
        raise ValueError(f"q has {q.shape[0]} rows but cu_seqlens_q says {pages.bounds[-1]}")
    k = paged["k_pages"]
    if k.shape[3] != q.shape[2] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads of {q.shape[2]}, k_pages {k.shape[1]} of {k.shape[3]}: head dims must be equal, "
            "and query heads a multiple of key heads"
        )
    v = paged.get("v_pages")
    if v is not None and v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v_pages {list(v.shape)} and k_pages {list(k.shape)} must agree in all but the last dim")


def _resolved(backend: str, q: Tensor) -> str:
    """The name of the backend that runs for tensors like `q`, `[M, H, D]` or `[1, H, M, D]`."""
    if backend not in NAMES:
        raise unknown("paged backend", backend, NAMES)
    if backend == "auto":
        wanted = (name for name in backends.PREFERRED.get(q.device.type, ()) if name in MODULES)
        return next((name for name in wanted if backends.load(name).why_not(q) is None), "reference")
    problem = backends.load(backend).why_not(q)
    if problem is not None:
        raise ValueError(f"backend {backend!r} cannot run here: {problem}")
    return backend


@functools.cache
def _load(name: str) -> Any:
    """The paged module of a backend: `has_kernel`, `rank`, `attend`, and `new_store`,
    `store_kind` and `update` of summaries."""
    return importlib.import_module(f"{backends.__name__}.{MODULES[name]}")


def _told(policy: Policy, pages: Pages, geometry: Geometry, device: torch.device) -> tuple[Tensor, Tensor]:
    """The sequences that the rule is told of, on the host and on the device.

    Rules protect the last tiles of every sequence they are told of. So the tiles that are the prompt's last ones keep
    their sequence's id, and all others have none (-1), like tiles that do not exist.
    """
    if pages.prompt_lens is None:
        return geometry.sequence, placed(geometry, device, "sequence", lambda: geometry.sequence.to(device))
    if not is_chunk_proof(policy):
        raise ValueError(
            f"what {policy.name!r} keeps depends on how prompts are cut into chunks: use "
            "closecall.paged.chunk_proof(policy) (or leave prompt_lens out, if every prompt comes whole)"
        )
    tiles = protected_tiles(policy.rule)
    what = ("told", tiles)
    told = placed(geometry, geometry.row.device, what, lambda: geometry.sequence.where(geometry.among_last(tiles), -1))
    return told, placed(geometry, device, what, lambda: told.to(device))


def _select(
    q: Tensor,
    k_pages: Tensor,
    policy: Policy,
    pages: Pages,
    plan: Plan,
    scale: float,
    name: str,
    all_heads: AllHeads,
    summaries: PageSummaries | None,
) -> Selection | None:
    """Of the chosen tiles; None if there are none."""
    geometry = plan.chosen
    q4 = _four(q)
    if summaries is not None:
        if summaries.policy != policy:
            raise ValueError(f"these summaries are of the policy {summaries.policy}, not of {policy}")
        summaries._complete(q4, k_pages, plan.dense, plan)
    if geometry is None:
        return None
    check_room(policy, geometry)
    told, sequence = _told(policy, pages, geometry, q.device)
    if covers_everything(policy, geometry):
        if summaries is not None:
            summaries._complete(q4, k_pages, geometry, plan)
        return placed(geometry, q.device, ("all", q.shape[1]), lambda: select_all(geometry, q.shape[1], q.device))
    machine, store = _load(name), None
    ranks = machine.has_kernel(policy, q.shape[2])
    if summaries is not None:
        if ranks and _resolved(summaries.backend, q4) == name:
            store = summaries.store(q4, k_pages, geometry, plan)
        else:
            summaries._complete(q4, k_pages, geometry, plan)
    if ranks:
        ranked: Ranked = machine.rank(q4, k_pages, policy, geometry, plan, scale, told, store)
    else:
        ranked = paged_reference.rank(q4, k_pages, policy, geometry, plan, scale, told)
    ranked = dataclasses.replace(ranked, sequence=sequence, all_heads=all_heads)
    decision = policy.rule.decide(ranked)
    width = policy.rule.limit(geometry.n_blocks)
    kv_idx = backends.load(name).gather_kept(ranked, decision.counts, geometry, policy.sinks, width)
    return Selection.of_groups(kv_idx, decision, geometry, q.shape[1])


def select(
    q: Tensor,
    k_pages: Tensor,
    policy: Policy | str,
    pages: Pages,
    *,
    scale: float | None = None,
    backend: str = "auto",
    all_heads: AllHeads = alone,
    summaries: PageSummaries | None = None,
) -> Selection | None:
    """Which blocks the prompt tiles of a step keep; None where the step has none.

    `q [M, H, D]`, the rows of all sequences; `k_pages [P, Hkv, page, D]` with any strides, this step's keys written
    already. Rows after a prompt's end, and prompts shorter than `pages.min_context`, are not in the selection:
    `attend` lets them see everything. With prompt lengths in `pages` the policy must be chunk-proof. `all_heads` brings
    in the margins of heads on other tensor-parallel ranks.
    """
    policy = as_policy(policy)
    _check(q, pages, k_pages=k_pages)
    plan = pages.plan(k_pages.shape[2], policy.block, policy.tile)
    scale = check_scale(scale, q.shape[2])
    return _select(q, k_pages, policy, pages, plan, scale, _resolved(backend, q), all_heads, summaries)


def _attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    selection: Selection | None,
    plan: Plan,
    scale: float,
    softcap: float,
    name: str,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    shape = (q.shape[0], q.shape[1], v_pages.shape[3])
    if out is None:  # every row is in a tile of the plan, so every row will be written, and its lse
        out = q.new_empty(shape)
    elif tuple(out.shape) != shape or out.dtype != q.dtype or out.device != q.device or out.stride(2) != 1:
        raise ValueError(
            f"out must be {q.dtype} {list(shape)} on {q.device} with a last stride of 1, got {out.dtype} "
            f"{list(out.shape)} on {out.device} with strides {out.stride()}"
        )
    run = _load(name).attend
    lse = q.new_empty(1, q.shape[1], q.shape[0], dtype=torch.float32)
    if plan.chosen is not None:
        run(_four(q), k_pages, v_pages, selection, plan.chosen, plan, scale, softcap, _four(out), lse)
    if plan.dense is not None:
        run(_four(q), k_pages, v_pages, None, plan.dense, plan, scale, softcap, _four(out), lse)
    return out, lse[0]


def _attend_dense(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    pages: Pages,
    grid: tuple[int, int],
    scale: float | None,
    softcap: float,
    backend: str,
    out: Tensor | None,
) -> Tensor:
    """Attention to everything.

    An engine asks for the same in every layer of a step, with tensors that only lie elsewhere. What the first layer
    checked and made ready, the others do not look at again.
    """
    like: tuple[Any, ...] | None = None
    whole = isinstance(pages, Pages) and all(isinstance(x, Tensor) for x in (q, k_pages, v_pages))
    if whole and isinstance(out, Tensor) and isinstance(scale, (int, float, type(None))):
        layouts = tuple((x.dtype, x.device, x.shape, x.stride()) for x in (q, k_pages, v_pages, out))
        like = (grid, scale, softcap, backend, layouts)
        ready = pages._repeated.get(like)
        if ready is not None:
            for run in ready:
                run(q, k_pages, v_pages, out)
            return out
    _check(q, pages, k_pages=k_pages, v_pages=v_pages)
    check_softcap(softcap)
    plan, name = pages.plan(k_pages.shape[2], *grid), _resolved(backend, q)
    how = (check_scale(scale, q.shape[2]), softcap)
    result, _ = _attend(q, k_pages, v_pages, None, plan, *how, name, out)
    if like is not None:
        parts = [geometry for geometry in (plan.chosen, plan.dense) if geometry is not None]
        repeated = _load(name).repeated
        runs = [repeated(_four(q), k_pages, v_pages, geometry, plan, *how, _four(result)) for geometry in parts]
        if None not in runs:
            pages._repeated[like] = runs
    return result


@overload
def attend(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, selection: Selection | None, pages: Pages, *,
    block: int = 64, tile: int = 64, scale: float | None = None, backend: str = "auto", softcap: float = 0.0,
    out: Tensor | None = None, return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def attend(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, selection: Selection | None, pages: Pages, *,
    block: int = 64, tile: int = 64, scale: float | None = None, backend: str = "auto", softcap: float = 0.0,
    out: Tensor | None = None, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    selection: Selection | None,
    pages: Pages,
    *,
    block: int = 64,
    tile: int = 64,
    scale: float | None = None,
    backend: str = "auto",
    softcap: float = 0.0,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact causal attention `[M, H, Dv]` over the kept blocks; over everything where nothing was selected.

    `selection` is what `select` made with the same `pages`, or None for dense attention (on a grid of `block` and
    `tile`, which a selection brings along). With `return_lse` also the log-sum-exp `[H, M]` of each row.
    """
    if selection is None and not return_lse:
        return _attend_dense(q, k_pages, v_pages, pages, (block, tile), scale, softcap, backend, out)
    _check(q, pages, k_pages=k_pages, v_pages=v_pages)
    check_softcap(softcap)
    if selection is not None:
        block, tile = selection.block, selection.tile
    plan = pages.plan(k_pages.shape[2], block, tile)
    if selection is not None:
        if selection.geometry is not plan.chosen:
            raise ValueError("the selection was made for another step: select again with these pages")
        if q.device.type == "cpu" or not selection.untouched:  # elsewhere checking would wait for the device
            selection.check()
    scale = check_scale(scale, q.shape[2])
    result, lse = _attend(q, k_pages, v_pages, selection, plan, scale, softcap, _resolved(backend, q), out)
    return (result, lse) if return_lse else result


@overload
def attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, policy: Policy | str, pages: Pages, *, scale: float | None = None,
    backend: str = "auto", softcap: float = 0.0, out: Tensor | None = None, all_heads: AllHeads = alone,
    summaries: PageSummaries | None = None, return_selection: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, policy: Policy | str, pages: Pages, *, scale: float | None = None,
    backend: str = "auto", softcap: float = 0.0, out: Tensor | None = None, all_heads: AllHeads = alone,
    summaries: PageSummaries | None = None, return_selection: Literal[True],
) -> tuple[Tensor, Selection | None]: ...  # fmt: skip


def attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    policy: Policy | str,
    pages: Pages,
    *,
    scale: float | None = None,
    backend: str = "auto",
    softcap: float = 0.0,
    out: Tensor | None = None,
    all_heads: AllHeads = alone,
    summaries: PageSummaries | None = None,
    return_selection: bool = False,
) -> Tensor | tuple[Tensor, Selection | None]:
    """`select` and `attend` in one call: `[M, H, Dv]`, and with `return_selection` also what was kept.

    >>> import torch, closecall
    >>> from closecall import paged
    >>> k_pages, v_pages = torch.randn(8, 1, 64, 16), torch.randn(8, 1, 64, 16)  # [pages, heads, page, dim]
    >>> table = torch.tensor([[5, 2, 7]], dtype=torch.int32)
    >>> pages = paged.Pages(table, torch.tensor([0, 30]), torch.tensor([150]))  # 30 rows after 120 cached ones
    >>> q = torch.randn(30, 2, 16)
    >>> out = paged.attention(q, k_pages, v_pages, "dense", pages)
    >>> k, v = (x[table[0].long()].transpose(0, 1).flatten(1, 2)[None, :, :150] for x in (k_pages, v_pages))
    >>> torch.allclose(out, closecall.attention(q.transpose(0, 1)[None], k, v, "dense")[0].transpose(0, 1), atol=1e-5)
    True
    """
    policy = as_policy(policy)
    if not policy.rule.needs_scores:
        grid = (policy.block, policy.tile)
        result = _attend_dense(q, k_pages, v_pages, pages, grid, scale, softcap, backend, out)
        return (result, None) if return_selection else result
    _check(q, pages, k_pages=k_pages, v_pages=v_pages)
    check_softcap(softcap)
    scale = check_scale(scale, q.shape[2])
    name = _resolved(backend, q)
    plan = pages.plan(k_pages.shape[2], policy.block, policy.tile)
    made = _select(q, k_pages, policy, pages, plan, scale, name, all_heads, summaries)
    result, _ = _attend(q, k_pages, v_pages, made, plan, scale, softcap, name, out)
    return (result, made) if return_selection else result
