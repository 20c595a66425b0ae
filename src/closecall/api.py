"""The operator: `select` which blocks, `attend` over them, or both as `attention`. One pipeline for everybody."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from . import backends
from .checks import check_prompt_len, check_qk, check_qkv, check_scale, check_softcap
from .chunks import within_prompt
from .geometry import Geometry, plan
from .placed import placed
from .policy import Policy, as_policy
from .ranking import AllHeads, Source, alone
from .selection import Selection, select_all
from .summaries import Summaries


def covers_everything(policy: Policy, geometry: Geometry) -> bool:
    """Tells whether the policy keeps every visible block of every tile, whatever the scores."""
    tile_budget = policy.rule.tile_budget
    return not policy.rule.needs_scores or (tile_budget is not None and tile_budget >= geometry.n_blocks)


def check_room(policy: Policy, geometry: Geometry) -> None:
    """Raises if the forced blocks of some tile fill the tile budget."""
    tile_budget = policy.rule.tile_budget
    if tile_budget is None or tile_budget > policy.most_forced:  # a bound of any geometry: no need to look at this one
        return
    forced = geometry.forced(policy.sinks)
    most = int(forced.max())
    if tile_budget <= most:
        b, t = (forced == most).nonzero()[0].tolist()
        raise policy.no_room(most, f"forced blocks of tile {t} of batch row {b}")


def check_summaries(summaries: Summaries | None, key_padding: Tensor | None, cu_seqlens: Tensor | None) -> None:
    """Raises where summaries cannot be kept: sequences must begin with their buffer and grow together."""
    if summaries is None:
        return
    if not isinstance(summaries, Summaries):
        raise TypeError(f"summaries must be a closecall.Summaries or None, got {type(summaries).__name__}")
    if key_padding is not None or cu_seqlens is not None:
        name = "key_padding" if key_padding is not None else "cu_seqlens"
        raise ValueError(
            f"summaries cannot be kept with {name}: leave summaries out, or call for each sequence alone, without "
            f"{name} and with a closecall.Summaries of its own"
        )


@contextlib.contextmanager
def _memory_for(policy: Policy, geometry: Geometry, heads: int) -> Iterator[None]:
    """If memory runs out, raises an error that says how much a selection needs and how to need less."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's own errors are RuntimeErrors of any kind
        if not isinstance(error, MemoryError) and "alloc" not in str(error):
            raise
        width = geometry.n_blocks if covers_everything(policy, geometry) else policy.rule.limit(geometry.n_blocks)
        cells = geometry.batch * heads * geometry.n_tiles
        raise MemoryError(
            f"memory does not suffice to choose blocks for {heads} heads of {geometry.n_tiles} tiles: up to {width} "
            f"blocks a tile take {12 * cells * width:,} bytes. Use a policy that caps what a tile keeps (topk, router, "
            "auto), a smaller budget, or chunks of rows with closecall.Summaries; closecall.attention with 'dense' "
            "needs no selection"
        ) from error


class Result(NamedTuple):
    """The output of a call, what was kept, and how long both steps took."""

    out: Tensor
    lse: Tensor
    kept: Selection | None  # None: every visible block
    select_seconds: float
    attend_seconds: float


@dataclass(frozen=True, eq=False)
class PlannedCall:
    """One call on checked arguments: `select`, `attention` and attached models all run through here.

    With fewer than `dense_below` keys every visible block is kept. `all_heads`, `summaries` and `prompt_len` are as in
    `select`.
    """

    q: Tensor
    k: Tensor
    policy: Policy
    geometry: Geometry
    scale: float
    backend: backends.Backend
    all_heads: AllHeads = alone
    summaries: Summaries | None = None
    dense_below: int = 0
    prompt_len: int | None = None

    def select(self) -> Selection | None:
        """Returns the kept blocks, or None where every visible block is kept, whatever the scores."""
        if self.summaries is not None:
            self.summaries.begin()
        if self.k.shape[2] < self.dense_below:
            return None
        policy, geometry = within_prompt(self.policy, self.geometry, self.prompt_len)
        check_room(policy, geometry)
        if covers_everything(policy, geometry):
            return None
        with _memory_for(policy, geometry, self.q.shape[1]):
            ranked = self.backend.rank(self.q, self.k, policy, geometry, self.scale, self.summaries)
            source = Source(self.q, self.k, geometry, self.scale, policy.sinks)
            asking = None
            if geometry.asking is not None:
                device = self.q.device
                asking = placed(geometry, device, "asking", lambda: geometry.told.to(device))
            complete = dataclasses.replace(ranked, all_heads=self.all_heads, source=source, asking=asking)
            decision = policy.rule.decide(complete)
            width = policy.rule.limit(geometry.n_blocks)
            kv_idx = self.backend.gather_kept(ranked, decision.counts, geometry, policy.sinks, width)
            return Selection.of_groups(kv_idx, decision, geometry, self.q.shape[1])

    def run(self, v: Tensor, softcap: float = 0.0) -> Result:
        """Selects, then attends over the kept blocks."""
        start = time.perf_counter()
        kept = self.select()
        selected = time.perf_counter()
        out, lse = self.backend.attend(self.q, self.k, v, kept, self.geometry, self.scale, softcap)
        return Result(out, lse, kept, selected - start, time.perf_counter() - selected)


def _plan(
    q: Tensor, k: Tensor, policy: Policy | str, scale: float | None, backend: str, key_padding: Tensor | None,
    cu_seqlens: Tensor | None, all_heads: AllHeads | None, summaries: Summaries | None, prompt_len: int | None,
) -> PlannedCall:  # fmt: skip
    """Plans a call for `select` or `attention`. They have checked q and k already."""
    policy = as_policy(policy)
    scale = check_scale(scale, q.shape[-1])
    geometry = plan(q.shape[0], q.shape[2], k.shape[2], policy.block, policy.tile, key_padding, cu_seqlens)
    check_summaries(summaries, key_padding, cu_seqlens)
    if all_heads is not None and not callable(all_heads):
        raise TypeError(f"all_heads must be a function of a tensor [B, H, ...], got {type(all_heads).__name__}")
    check_prompt_len(prompt_len, k.shape[2], packed=cu_seqlens is not None)
    chosen = backends.choose(backend, q)
    return PlannedCall(
        q, k, policy, geometry, scale, chosen, all_heads or alone, summaries, prompt_len=prompt_len
    )  # fmt: skip


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
    all_heads: AllHeads | None = None,
    prompt_len: int | None = None,
) -> Selection:
    """Chooses the key blocks that each tile of queries keeps, and says how sure the cut was.

    `q [B, H, M, D]`, `k [B, Hkv, N, D]`, M <= N; query row i sits at key position N - M + i. `key_padding` is bool
    `[B, N]` with True for real keys (padding on the left or right); `cu_seqlens` packs whole sequences into one row.
    With `summaries`, blocks that were complete at the last call are not read again; `Summaries` says what `k` must then
    hold.

    `all_heads` is for tensor parallelism, where q holds only this rank's heads and rules must see the whole layer's. It
    is called with a tensor `[B, H, ...]` of this rank's numbers. It returns those of all ranks, `[B, all heads, ...]`,
    in the same order on every rank, and the slice of heads that are this rank's own.

    `prompt_len` is for prompts that come in chunks: how many keys the whole prompt will have (any large number while
    that is unknown). Rules that protect the last tiles, as `auto` does, then protect those of the prompt and not of
    every chunk. Without it, each call counts as the end of a prompt.

    A block whose score is NaN (a NaN in its keys) ranks behind every number. If a query row is NaN, the other rows of
    its tile decide.
    """
    if torch.compiler.is_compiling():
        return _untraced_select(
            q, k, policy, scale=scale, backend=backend, key_padding=key_padding, cu_seqlens=cu_seqlens,
            summaries=summaries, all_heads=all_heads, prompt_len=prompt_len,
        )  # fmt: skip
    check_qk(q, k)
    call = _plan(q, k, policy, scale, backend, key_padding, cu_seqlens, all_heads, summaries, prompt_len)
    kept = call.select()
    if kept is None:
        with _memory_for(call.policy, call.geometry, q.shape[1]):
            return select_all(call.geometry, q.shape[1], q.device)
    return kept


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
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, scale: float | None = None, backend: str = "auto",
    softcap: float = 0.0, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
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
    if torch.compiler.is_compiling():
        return _untraced_attend(
            q, k, v, selection, scale=scale, backend=backend, softcap=softcap, return_lse=return_lse
        )
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
    if selection.lists.device != q.device or selection.counts.device != q.device:
        raise ValueError(
            f"the selection is on {selection.lists.device} but q is on {q.device}: move it with selection.to()"
        )
    if q.device.type == "cpu" or not selection.untouched:  # elsewhere checking would wait for the device
        selection.check()
    if selection.lists.shape[1] != q.shape[1]:
        raise ValueError(
            f"the selection has {selection.lists.shape[1]} heads but q has {q.shape[1]}: select again on these tensors"
        )
    out, lse = backends.choose(backend, q).attend(q, k, v, selection, g, scale, softcap)
    return (out, lse) if return_lse else out


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, policy: Policy | str, *, scale: float | None = None, backend: str = "auto",
    key_padding: Tensor | None = None, cu_seqlens: Tensor | None = None, softcap: float = 0.0,
    return_lse: Literal[False] = False, summaries: Summaries | None = None, all_heads: AllHeads | None = None,
    prompt_len: int | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, policy: Policy | str, *, scale: float | None = None, backend: str = "auto",
    key_padding: Tensor | None = None, cu_seqlens: Tensor | None = None, softcap: float = 0.0,
    return_lse: Literal[True], summaries: Summaries | None = None, all_heads: AllHeads | None = None,
    prompt_len: int | None = None,
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
    all_heads: AllHeads | None = None,
    prompt_len: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`select` and `attend` in one call. Where the policy keeps every visible block anyway, nothing is selected.

    Arguments are those of the two. Under `torch.compile` the call is one opaque node of the graph; with `summaries` or
    `all_heads`, which no graph can hold, it breaks the graph, as `select` and `attend` do.
    """
    check_qkv(q, k, v)
    check_softcap(softcap)
    if torch.compiler.is_compiling():
        if summaries is None and all_heads is None:
            text = _as_text(policy)
            out, lse = attention_op(q, k, v, text, scale, backend, key_padding, cu_seqlens, float(softcap), prompt_len)
            return (out, lse) if return_lse else out
        return _untraced_attention(
            q, k, v, policy, scale=scale, backend=backend, key_padding=key_padding, cu_seqlens=cu_seqlens,
            softcap=softcap, return_lse=return_lse, summaries=summaries, all_heads=all_heads, prompt_len=prompt_len,
        )  # fmt: skip
    call = _plan(q, k, policy, scale, backend, key_padding, cu_seqlens, all_heads, summaries, prompt_len)
    result = call.run(v, softcap)
    return (result.out, result.lse) if return_lse else result.out


# torch.compile. Dynamo must not trace what lies below: it would follow the plan, the rules and raw pointers. Decorators
# of torch.compiler would import Dynamo, and that takes longer than importing the rest of torch; these do it when used.

_untraced_select: Callable[..., Selection] = _disable_dynamo(select)
_untraced_attend: Callable[..., Tensor | tuple[Tensor, Tensor]] = _disable_dynamo(attend)
_untraced_attention: Callable[..., Tensor | tuple[Tensor, Tensor]] = _disable_dynamo(attention)


def _as_text(policy: Policy | str) -> str:
    """Turns a policy into a string, which a graph can hold."""
    return as_policy(policy).to_json()


_as_text._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result
_from_text = functools.lru_cache(maxsize=64)(Policy.from_json)


@torch.library.custom_op("closecall::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: str,
    scale: float | None,
    backend: str,
    key_padding: Tensor | None,
    cu_seqlens: Tensor | None,
    softcap: float,
    prompt_len: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` with a policy as JSON: output and log-sum-exp."""
    call = _plan(q, k, _from_text(policy), scale, backend, key_padding, cu_seqlens, None, None, prompt_len)
    result = call.run(v, softcap)
    return result.out, result.lse


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return backends.empty_outputs(q, v)
