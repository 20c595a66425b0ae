"""The native CPU kernels over pages: keys and values are read where they lie, in any strides.

Same kernels, same steps, same order of additions as over one piece of memory, so the results are equal bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..geometry import Geometry
from ..pages import Plan, Repeated
from ..policy import Policy
from ..ranking import Ranked
from ..scorers.reductions import Of
from ..selection import Selection
from . import cpu


def has_kernel(policy: Policy, dim: int) -> bool:
    """Whether blocks can be ranked natively."""
    return cpu.kernel(policy, dim) is not None


def _where(plan: Plan, k_pages: Tensor) -> tuple[int, ...]:
    """struct Pages of native/args.h."""
    return (plan.table.data_ptr(), plan.page, plan.table.numel(), k_pages.shape[0])


def _rank_args(
    q: Tensor, k_pages: Tensor, policy: Policy, geometry: Geometry, plan: Plan, scale: float, width: int,
    outputs: tuple[int, int, int, int], store: Tensor | None, every_row: Tensor | None = None,
) -> bytes:  # fmt: skip
    native = cpu.kernel(policy, q.shape[3])
    assert native is not None
    kinds = (native.summary, native.reduction, policy.sinks, width)
    inputs = (*cpu._view(q), *cpu._view(k_pages), *cpu._shape(q, k_pages, 0), *cpu._tiles(geometry), *kinds)
    kept = (0 if store is None else store.data_ptr(), 0, 0)
    single, together = 0 if every_row is None else every_row.data_ptr(), cpu.ranked_together(policy, q, k_pages)
    pooling = cpu.pooling_args(policy, geometry, single, together)
    numbers = (scale, torch.get_num_threads(), cpu._tier(), *_where(plan, k_pages))
    return cpu._pack((*inputs, *outputs, q.shape[2], native.shrink, native.outliers, *kept, *pooling, *numbers))


def store_kind() -> str:
    """How summaries lie in a store depends on the tier."""
    return cpu.tier()


def new_store(q: Tensor, k_pages: Tensor, policy: Policy, geometry: Geometry, plan: Plan) -> Tensor:
    """Room for the summaries of all pages: uint8 `[P, Hkv, blocks of a page, bytes of a summary]`."""
    packed = _rank_args(q, k_pages, policy, geometry, plan, 1.0, 0, (0, 0, 0, 0), None)
    size = int(cpu._native.summary_bytes(packed))
    return torch.zeros(*k_pages.shape[:2], plan.page // policy.block, size, dtype=torch.uint8)


def update(q: Tensor, k_pages: Tensor, policy: Policy, geometry: Geometry, plan: Plan, store: Tensor) -> None:
    """Writes the summaries of the blocks that the geometry's rows complete."""
    cpu._native.update(_rank_args(q, k_pages, policy, geometry, plan, 1.0, 0, (0, 0, 0, 0), store))


def rank(
    q: Tensor, k_pages: Tensor, policy: Policy, geometry: Geometry, plan: Plan, scale: float, told: Tensor,
    store: Tensor | None = None,
) -> Ranked:  # fmt: skip
    """The ranking of `cpu.rank`, for a rule that is told of the sequences `told`.

    With a store, blocks that were complete before the first row are not read again.
    """
    width = policy.rule.limit(geometry.n_blocks)
    shape = (1, q.shape[1] // cpu.ranked_together(policy, q, k_pages), geometry.n_tiles, width)
    order, scores = torch.empty(shape, dtype=torch.int32), torch.empty(shape)
    limits = policy.rule.limits(told, geometry.n_blocks)
    every_row = policy.every_row(geometry, told)
    single = None if every_row is None else every_row.to(torch.uint8).contiguous()
    far = torch.empty(0, dtype=torch.int32) if limits is None else limits.to(torch.int32).contiguous()
    forced = _forced_mass(q, k_pages, geometry, plan, scale, policy.sinks) if policy.reduction.of is Of.MASS else None
    masses = 0 if forced is None else forced.data_ptr()
    outputs = (order.data_ptr(), scores.data_ptr(), far.data_ptr() if far.numel() else 0, masses)
    cpu._native.rank(_rank_args(q, k_pages, policy, geometry, plan, scale, width, outputs, store, single))
    return Ranked(order, scores, geometry.visible, geometry.forced(policy.sinks), geometry.sequence)


def _forced_mass(q: Tensor, k_pages: Tensor, geometry: Geometry, plan: Plan, scale: float, sinks: int) -> Tensor:
    out = q.new_empty(1, q.shape[1], q.shape[2], 8)  # hardly any values

    def lse_of(kept: Selection) -> Tensor:
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        attend(q, k_pages, k_pages[..., :8], kept, geometry, plan, scale, 0.0, out, lse)
        return lse

    return cpu.forced_mass(q.shape[1], geometry, sinks, lse_of)


def _attend_fields(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, kept: tuple[int, ...], geometry: Geometry, plan: Plan, scale: float,
    softcap: float, out: Tensor, lse: Tensor,
) -> tuple[int | float, ...]:  # fmt: skip
    """struct AttendArgs of native/args.h."""
    inputs = (*cpu._view(q), *cpu._view(k_pages), *cpu._view(v_pages))
    views = (*inputs, *cpu._view(out), lse.data_ptr(), q.shape[2])
    shape = cpu._shape(q, k_pages, v_pages.shape[3])
    numbers = (scale, float(softcap), torch.get_num_threads(), cpu._tier())
    return (*views, *shape, *cpu._tiles(geometry), *kept, *numbers, *_where(plan, k_pages))


def attend(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, selection: Selection | None, geometry: Geometry, plan: Plan,
    scale: float, softcap: float, out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """Writes the geometry's rows of `out [1, H, M, Dv]` and `lse [1, H, M]`."""
    kept, alive = cpu.kept_args(selection, q, k_pages)
    fields = _attend_fields(q, k_pages, v_pages, kept, geometry, plan, scale, softcap, out, lse)
    cpu._native.attend(cpu._pack(fields))
    del alive


def repeated(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, geometry: Geometry, plan: Plan, scale: float, softcap: float,
    out: Tensor,
) -> Repeated:  # fmt: skip
    """Dense attention as a function of q, k_pages, v_pages and out, for tensors laid out like these.

    Over a short cache a decoding row keeps the kernel busy for less time than it takes to look at four tensors. So
    what all layers of a step have in common is looked at once. The plan must live as long as the function.
    """
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)  # for the kernel; nobody asked for it
    kept, _ = cpu.kept_args(None, q, k_pages)
    fields = _attend_fields(q, k_pages, v_pages, kept, geometry, plan, scale, softcap, out, lse)
    form = cpu._format(tuple(map(type, fields)))
    q_strides, k_strides, v_strides, out_strides = (x.stride() for x in (q, k_pages, v_pages, out))
    rest, where = fields[21:-6], fields[-4:]  # between them threads and tier, which may change from call to call

    def run(q: Tensor, k_pages: Tensor, v_pages: Tensor, out: Tensor) -> None:
        inputs = (q.data_ptr(), *q_strides, k_pages.data_ptr(), *k_strides, v_pages.data_ptr(), *v_strides)
        outputs = (out.data_ptr(), *out_strides, lse.data_ptr())
        cpu._native.attend(form.pack(*inputs, *outputs, *rest, torch.get_num_threads(), cpu._tier(), *where))

    return run
