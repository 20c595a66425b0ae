"""Attention over kept blocks: `attend` from a selection, `attention` from a policy."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from . import backends
from .checks import check_qkv, check_scale, check_softcap
from .geometry import plan
from .policy import Policy, as_policy
from .selection import Selection, check_forced, check_summaries, covers_everything, select_planned
from .summaries import Summaries


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
