"""The operator: `select` which blocks, `attend` over them, or both as `attention`. One pipeline for everybody."""

from __future__ import annotations

import dataclasses
from typing import Literal, overload

import torch
from torch import Tensor

from . import backends
from .checks import check_qk, check_qkv, check_scale, check_softcap
from .geometry import Geometry, plan
from .policy import Policy, as_policy
from .rules.base import AllHeads, Source, alone
from .selection import Selection, select_all
from .summaries import Summaries


def check_forced(policy: Policy, geometry: Geometry) -> None:
    """The tile budget must leave room beside the forced blocks of every tile."""
    tile_budget = getattr(policy.rule, "tile_budget", None)
    if tile_budget is None or tile_budget > policy.most_forced:  # a bound of any geometry: no need to look at this one
        return
    forced = geometry.forced(policy.sinks)
    most = int(forced.max())
    if tile_budget <= most:
        b, t = (forced == most).nonzero()[0].tolist()
        enough = most / getattr(policy.rule, "tile_factor", 1)
        raise ValueError(
            f"tile budget {tile_budget} must exceed the {most} forced blocks of tile {t} of batch row {b} "
            f"({policy.sinks} sink, the rest its own): use a budget above {enough:g}"
        )


def covers_everything(policy: Policy, geometry: Geometry) -> bool:
    """Whether the policy keeps every visible block of every tile, whatever the scores."""
    tile_budget = getattr(policy.rule, "tile_budget", None)
    return not policy.rule.needs_scores or (tile_budget is not None and tile_budget >= geometry.n_blocks)


def check_summaries(summaries: Summaries | None, key_padding: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Kept summaries are of sequences that all begin with their buffer and grow together."""
    if summaries is None:
        return
    if not isinstance(summaries, Summaries):
        raise TypeError(f"summaries must be a closecall.Summaries or None, got {type(summaries).__name__}")
    given = "key_padding" if key_padding is not None else "cu_seqlens" if cu_seqlens is not None else None
    if given is not None:
        raise ValueError(
            f"summaries cannot be kept with {given}: leave summaries out, or call for each sequence alone, without "
            f"{given} and with a closecall.Summaries of its own"
        )


def select_planned(
    q: Tensor,
    k: Tensor,
    policy: Policy,
    geometry: Geometry,
    scale: float,
    backend: backends.Backend,
    all_heads: AllHeads = alone,
    summaries: Summaries | None = None,
) -> Selection:
    """`select` on checked arguments. `all_heads` brings in the margins of other ranks' heads."""
    if summaries is not None:
        summaries.begin()
    if covers_everything(policy, geometry):
        return select_all(geometry, q.shape[1], q.device)
    keeping = backends.keeping(backend)
    if summaries is None or keeping is None:
        ranked = backend.rank(q, k, policy, geometry, scale)
    else:
        ranked = keeping.rank(q, k, policy, geometry, scale, summaries)
    source = Source(q, k, geometry, scale, policy.sinks)
    decision = policy.rule.decide(dataclasses.replace(ranked, all_heads=all_heads, source=source))
    width = policy.rule.limit(geometry.n_blocks)
    return Selection.made(
        kv_idx=backend.gather_kept(ranked, decision.counts, geometry, policy.sinks, width),
        counts=decision.counts.to(torch.int32).contiguous(),
        margin=decision.margin,
        triggered=decision.triggered,
        geometry=geometry,
    )


def select(
    q: Tensor,
    k: Tensor,
    policy: Policy | str,
    *,
    scale: float | None = None,
    backend: str = "auto",
    key_padding: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    summaries: Summaries | None = None,
) -> Selection:
    """Which key blocks each tile of queries keeps, and how sure the cut was.

    `q [B, H, M, D]`, `k [B, Hkv, N, D]`, M <= N; query row i sits at key position N - M + i. `key_padding` is bool
    `[B, N]` with True for real keys (padding on the left or right); `cu_seqlens` packs whole sequences into one row.
    With `summaries`, blocks that were complete at the last call with them are not read again (see `Summaries` for what
    then must hold of `k`).

    A block whose score is NaN (a NaN in its keys) ranks behind every number; a NaN in a query row leaves the other rows
    of its tile to decide.
    """
    policy = as_policy(policy)
    check_qk(q, k)
    scale = check_scale(scale, q.shape[-1])
    geometry = plan(q.shape[0], q.shape[2], k.shape[2], policy.block, policy.tile, key_padding, cu_seqlens)
    check_summaries(summaries, key_padding, cu_seqlens)
    check_forced(policy, geometry)
    return select_planned(q, k, policy, geometry, scale, backends.choose(backend, q), summaries=summaries)


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, scale: float | None = None, backend: str = "auto",
    softcap: float = 0.0, return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, scale: float | None = None, backend: str = "auto",
    softcap: float = 0.0, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection,
    *,
    scale: float | None = None,
    backend: str = "auto",
    softcap: float = 0.0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact causal softmax attention over the keys of the kept blocks, accumulated in float32.

    `q [B, H, M, D]`, `k [B, Hkv, N, D]`, `v [B, Hkv, N, Dv]`, any strides; the output is `[B, H, M, Dv]` in q's type.
    With `return_lse` also the log-sum-exp `[B, H, M]` of each row's scaled scores, to merge partial results. Padded
    rows, and rows that see none of the kept keys, get 0 and -inf.

    `softcap` flattens scaled scores s to `softcap * tanh(s / softcap)` (Gemma 2); 0 means none. A NaN or an infinity
    reaches only the rows that attend to it.

    >>> import torch, closecall
    >>> q, k, v = (torch.randn(1, 2, 300, 64) for _ in range(3))
    >>> everything = closecall.select(q, k, "dense")
    >>> dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(closecall.attend(q, k, v, everything), dense, atol=1e-5)
    True
    """
    check_qkv(q, k, v)
    scale = check_scale(scale, q.shape[-1])
    check_softcap(softcap)
    if not isinstance(selection, Selection):
        raise TypeError(f"selection must be a closecall.Selection, got {type(selection).__name__}: make it with select")
    g = selection.geometry
    if (g.batch, g.q_len, g.k_len) != (q.shape[0], q.shape[2], k.shape[2]):
        raise ValueError(
            f"the selection was made for B = {g.batch}, M = {g.q_len}, N = {g.k_len}, but the tensors have "
            f"B = {q.shape[0]}, M = {q.shape[2]}, N = {k.shape[2]}: select again on these tensors"
        )
    if selection.kv_idx.device != q.device or selection.counts.device != q.device:
        raise ValueError(
            f"the selection is on {selection.kv_idx.device} but q is on {q.device}: move it with selection.to()"
        )
    if q.device.type == "cpu" or not selection.untouched:  # elsewhere checking would wait for the device
        selection.check()
    if selection.kv_idx.shape[1] != q.shape[1]:
        raise ValueError(
            f"the selection has {selection.kv_idx.shape[1]} heads but q has {q.shape[1]}: select again on these tensors"
        )
    out, lse = backends.choose(backend, q).attend(q, k, v, selection, g, scale, softcap)
    return (out, lse) if return_lse else out


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, policy: Policy | str, *, scale: float | None = None, backend: str = "auto",
    key_padding: Tensor | None = None, cu_seqlens: Tensor | None = None, softcap: float = 0.0,
    return_lse: Literal[False] = False, summaries: Summaries | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, policy: Policy | str, *, scale: float | None = None, backend: str = "auto",
    key_padding: Tensor | None = None, cu_seqlens: Tensor | None = None, softcap: float = 0.0,
    return_lse: Literal[True], summaries: Summaries | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: Policy | str,
    *,
    scale: float | None = None,
    backend: str = "auto",
    key_padding: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    summaries: Summaries | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`select` and `attend` in one call, without a selection where the policy keeps every visible block anyway."""
    policy = as_policy(policy)
    check_qkv(q, k, v)
    scale = check_scale(scale, q.shape[-1])
    check_softcap(softcap)
    geometry = plan(q.shape[0], q.shape[2], k.shape[2], policy.block, policy.tile, key_padding, cu_seqlens)
    check_summaries(summaries, key_padding, cu_seqlens)
    check_forced(policy, geometry)
    chosen = backends.choose(backend, q)
    kept = None
    if not covers_everything(policy, geometry):
        kept = select_planned(q, k, policy, geometry, scale, chosen, summaries=summaries)
    elif summaries is not None:
        summaries.begin()
    out, lse = chosen.attend(q, k, v, kept, geometry, scale, softcap)
    return (out, lse) if return_lse else out
