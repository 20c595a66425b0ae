"""The Triton backend: block summaries, tile scores, attention and decode on CUDA and ROCm devices (kernels in gpu/).

Nothing between the kernels asks the device for anything, so a call can be captured in a CUDA graph once the same plan
has run before. On CPU tensors the same kernels run under Triton's interpreter where `TRITON_INTERPRET=1` asks for it:
to check them, many times slower than the `cpu` backend.

Limits:

* head and value dims up to 256; float32, bfloat16, float16;
* scorers that have no planes (`Scorer.planes`) are scored by the reference backend, which does ask the device;
* an infinite coordinate in a key makes its block's score NaN where the scorer makes boxes, so the block ranks last; an
  infinite value makes the rows that attend to it NaN;
* under `mass` and `mass-max`, a row that sees a forced key whose product is NaN or infinite has no say.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...geometry import Geometry
from ...policy import Policy
from ...ranking import Ranked
from ...scorers.base import Planes
from ...scorers.reductions import Of
from ...selection import Selection, each_head
from ...summaries import Summaries
from .. import empty_outputs, reference
from . import boxes, launch, scoring, tuning
from . import rank as ranking
from .interpret import kernels
from .tables import Paging, Tables, tables

FEW_ROWS = 16  # decode: calls of at most this many query rows
_REDUCTIONS = {(Of.SCORES, False), (Of.SCORES, True), (Of.MASS, False), (Of.MASS, True), (Of.SOFTMAX, False)}


OLDEST_TRITON = (3, 5)  # as the extra `triton` asks for


@functools.cache
def _problem() -> str | None:
    """What is wrong with the triton that is installed; None if nothing is."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    try:
        found = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # torch for ROCm brings it in a package of another name
        found = importlib.import_module("triton").__version__
    if tuple(int(n) for n in re.findall(r"\d+", found)[:2]) < OLDEST_TRITON:
        oldest = ".".join(map(str, OLDEST_TRITON))
        return f"triton {found} is older than {oldest}: pip install -U triton"
    return None


def _interpreting() -> bool:
    import triton  # type: ignore[import-untyped]

    return bool(triton.knobs.runtime.interpret)


def why_not(q: Tensor) -> str | None:
    if _problem() is not None:
        other = "cpu" if q.device.type == "cpu" else "flex"
        return f"{_problem()}, or use backend={other!r}"
    if q.device.type == "cpu":
        if not _interpreting():
            return (
                "Triton kernels run on cuda devices, not on cpu: use backend='cpu', or TRITON_INTERPRET=1 to check them"
            )
    elif q.device.type != "cuda":
        return f"Triton kernels run on cuda devices, not on {q.device.type}: use backend='reference'"
    else:
        problem = _device_problem(q.device)
        if problem is not None:
            return problem
    if q.dtype not in launch.DTYPES:
        return f"no Triton kernel for {q.dtype}: use float32, bfloat16 or float16, or backend='reference'"
    return _dim_problem("head", q.shape[-1])


def _dim_problem(kind: str, dim: int) -> str | None:
    if dim > launch.LARGEST_DIM:
        return f"no Triton kernel for {kind} dim {dim}, the largest is {launch.LARGEST_DIM}: use backend='flex'"
    return None


def _device_problem(device: torch.device) -> str | None:
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        if not properties.gcnArchName.startswith("gfx9"):
            return f"Triton kernels need a CDNA device (gfx9), not {properties.gcnArchName}: use backend='flex'"
    elif properties.major < 8:
        return (
            f"Triton kernels need compute capability 8.0, not {properties.major}.{properties.minor}: use backend='flex'"
        )
    return None


def _arch(device: torch.device) -> str:
    """The launch table's entry for a device."""
    if device.type == "cpu" or not torch.cuda.is_available():
        return "sm_80"  # under the interpreter any entry does
    if torch.version.hip:
        return "gfx942"
    properties = torch.cuda.get_device_properties(device)
    return launch.arch(properties.major, properties.minor)


def _call(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection | None = None, paged: Geometry | None = None
) -> tuning.Call:
    """What a kernel's launch is chosen by; where `k` holds `paged` keys, the longest sequence counts."""
    return tuning.Call(
        kernel, _arch(q.device), q.shape[3], v.shape[3], q.dtype, _device_name(q.device), q.shape[0], q.shape[1],
        k.shape[1], q.shape[2], k.shape[2] if paged is None else paged.n_blocks * paged.block,
        0 if selection is None else selection.lists.shape[3],
    )  # fmt: skip


@functools.cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@contextlib.contextmanager
def _running(device: torch.device) -> Iterator[Any]:
    """The kernels for a device, which is made the current one; under the interpreter, NumPy's warnings are silenced."""
    if device.type == "cpu":
        with np.errstate(all="ignore"):
            yield kernels(interpreted=True)
    else:
        with torch.cuda.device(device):
            yield kernels(interpreted=False)


def _wide(q: Tensor) -> bool:
    """Whether products are made in float32 whatever the type: under the interpreter, which cannot multiply bfloat16."""
    return q.device.type == "cpu"


def _summarise(k: Tensor, planes: Planes, here: Tables, block: int) -> tuple[Tensor, dict[str, Any]]:
    """Summaries `[Hkv, planes, slots, width]` and what the score kernels must know about them."""
    outliers = planes.outliers is not None
    shrink = 1.0 if planes.shrink is None else planes.shrink
    vectors = (planes.outliers or 0) + 1
    slots, dim = here.blocks.shape[0], k.shape[3]
    width = launch.padded(dim)
    told = launch.layout(planes, launch.DTYPES[k.dtype]) | {"WIDTH": width, "DIM": dim}
    chosen = tuning.choose(_call("outliers" if outliers else "summaries", k, k, k))
    keys = launch.fit(chosen.keys, block)
    common = {"KEYS": keys, "STEPS": -(-block // keys), "num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    # The interpreter cuts float32 off where it should round: there torch rounds what is no longer split into parts.
    dtype = torch.float32 if outliers and _wide(k) else k.dtype
    shape = (k.shape[1], told["PLANES"] + vectors - 1, slots, width)
    # The score kernel reads whole steps, without a mask, and so a little beyond the last block.
    everything = k.new_empty(math.prod(shape) + launch.MOST_KEYS * width, dtype=dtype)
    out = everything[: math.prod(shape)].view(shape)
    with _running(k.device) as kernel:
        if outliers:
            kernel.outliers_kernel[(slots, k.shape[1])](
                k, out, here.blocks, *k.stride(), slots, shrink, BOX=told["BOX"], VECTORS=vectors, WIDTH=width, DIM=dim,
                **common,
            )  # fmt: skip
        else:
            kernel.summaries_kernel[(slots, k.shape[1])](
                k, out, here.blocks, *k.stride(), slots, shrink, BOX=told["BOX"], SHRUNK=planes.shrink is not None,
                PLANES=told["PLANES"], SHIFT=told["SHIFT"], WIDTH=width, DIM=dim, **common,
            )  # fmt: skip
    return everything.to(k.dtype)[: math.prod(shape)].view(shape), told


def _forced_mass(
    q: Tensor, k: Tensor, geometry: Geometry, here: Tables, scale: float, sinks: int, paging: Paging | None
) -> Tensor:
    """`[B, H, M]`: the log-sum-exp of every row over its forced blocks, which are attended to with as few values as a
    product takes."""
    counts = here.forced(sinks)[:, None]
    order = torch.empty(*counts.shape, 0, dtype=torch.int32, device=q.device)
    nothing = Ranked(order, order.float(), here.visible, counts[:, 0], here.geometry.sequence)
    most = min(geometry.n_blocks, sinks + (geometry.tile + geometry.block - 2) // geometry.block + 1)
    kept = ranking.gather_kept(nothing, counts, here.geometry, sinks, most).expand(-1, q.shape[1], -1, -1)
    unknown = order.float()
    selection = Selection(kept, counts.expand(-1, q.shape[1], -1), unknown, unknown, geometry)
    v = k[..., : launch.FORCED_VALUES]
    if paging is None:
        return attend(q, k, v, selection, geometry, scale)[1]
    out, lse = empty_outputs(q.float() if _wide(q) else q, v)
    _many(q, k, v, selection, geometry, here, _factors(scale, 0.0), out, lse, paging)
    return lse


def has_kernel(policy: Policy) -> bool:
    """Whether kernels rank the blocks, and not the reference."""
    reduction = (policy.reduction.of, policy.reduction.mean)
    planes = None if policy.scorer is None else policy.scorer.planes
    return planes is not None and reduction in _REDUCTIONS


def rank(
    q: Tensor,
    k: Tensor,
    policy: Policy,
    geometry: Geometry,
    scale: float,
    summaries: Summaries | None = None,
    paging: Paging | None = None,
) -> Ranked:
    """As every backend's; with `paging`, `k` holds pages and the summaries were made before."""
    ranking.check_capture(q.device, policy, has_kernel(policy))
    if not has_kernel(policy):
        return reference.rank(q, k, policy, geometry, scale)
    assert policy.scorer is not None
    assert policy.scorer.planes is not None
    reduction, known = policy.reduction, policy.scorer.planes
    here = tables(geometry, q.device)
    n_blocks = geometry.n_blocks
    every_row = policy.every_row(geometry, None if paging is None else paging.told)
    everywhere = every_row is not None and bool((every_row | ~geometry.exists).all())
    if everywhere or (policy.candidates and policy.n_candidates(n_blocks) == n_blocks):  # every row sees every block
        policy, every_row = policy.replace(pool=1), None
    width = policy.rule.limit(n_blocks)
    again = policy.n_candidates(n_blocks)
    sort = not policy.rule.at_ranks or (again or n_blocks) > launch.MOST_SPAN
    forced = here.forced(policy.sinks)
    if here.blocks.shape[0] == 0:  # nothing but padding
        shape = (q.shape[0], k.shape[1] if policy.share == "group" else q.shape[1], geometry.n_tiles, width)
        order = torch.full(shape, n_blocks, dtype=torch.int32, device=q.device)
        nothing = torch.full(shape, -math.inf, device=q.device)
        return Ranked(order, nothing, here.visible, forced, here.geometry.sequence)
    planes, told = _summarise(k, known, here, geometry.block) if paging is None else paging.summaries
    own = None
    if reduction.of is Of.MASS:
        own = _forced_mass(q, k, geometry, here, scale, policy.sinks, paging)
        scale *= math.log2(math.e)
    with _running(q.device) as kernel:
        wide = told | {"WIDE": _wide(q)}
        scored = scoring.scored(kernel, q, own, policy, every_row, planes, geometry, here, wide, _arch(q.device))
    name = launch.scoring(told["VECTORS"], reduction.of is not Of.SCORES)
    order, scores = _best(name, scored, k, policy, scale, again or width, sort and not again)
    if again:
        rows = scored[0].again(q, own, order)
        decided = None if every_row is None else scores  # by tiles that looked everywhere
        order, scores = _best("again", [rows], k, policy, scale, width, sort, decided)
    if sort:
        return Ranked(order, scores, here.visible, forced, here.geometry.sequence)
    return ranking.Best(order, scores, here.visible, forced, here.geometry.sequence, scores_at=_scores_at)


def _best(
    name: str, scored: list[scoring.Scored], k: Tensor, policy: Policy, scale: float, width: int, sort: bool,
    decided: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The `width` best blocks of every tile and their scores: best first, or, if not to `sort`, in the order of the
    blocks and in the numbers of scores.py. What is `decided [B, who decides, T, columns]` counts for tiles that
    `scored` leaves out."""
    q, geometry, columns, listed = scored[0].q, scored[0].geometry, scored[0].columns, scored[0].listed
    batch, heads, n_tiles = q.shape[0], q.shape[1], geometry.n_tiles
    together = heads // k.shape[1] if policy.share == "group" else 1
    shape = (batch, heads // together, n_tiles, width)
    size = math.prod(shape)
    # Of lists of candidates the again kernel reads whole steps, without a mask, and one step more than there are.
    more = 2 * launch.MOST_KEYS if policy.candidates and listed is None else 0
    everything = torch.empty(size + more, dtype=torch.int32, device=q.device)
    if more:
        everything[size:] = 0
    order = everything[:size].view(shape)
    scores = torch.empty(shape, dtype=torch.float32 if sort else torch.int32, device=q.device)
    if policy.reduction.of is not Of.SCORES:

        def add_up(chosen: launch.Launch) -> None:
            with _running(q.device) as kernel:
                for rows in scored:
                    rows.add_up(kernel, chosen, policy.sinks, scale)

        tuning.run(_call("sums", q, k, k), add_up)

    def run(chosen: launch.Launch) -> None:
        packed = scored[0].tiles(chosen)
        with _running(q.device) as kernel:
            for some_heads, tiles in ranking.chunks(batch, heads, n_tiles, columns, together, packed):
                deciding = slice(some_heads.start // together, some_heads.stop // together)
                if decided is None:
                    shape = (batch, some_heads.stop - some_heads.start, tiles.stop - tiles.start, columns)
                    found = torch.empty(*shape, dtype=torch.int32, device=q.device)
                else:
                    found = each_head(decided[:, deciding, tiles], together).contiguous()
                for rows in scored:
                    rows.score(kernel, chosen, policy, scale, found, some_heads, tiles)
                if sort or columns > launch.MOST_SPAN:
                    found = torch.unflatten(found, 1, (-1, together)).amax(2)
                    some = None if listed is None else listed[:, deciding, tiles]
                    best = ranking.best(found, width, some) if sort else ranking.in_order(found, width)
                    order[:, deciding, tiles], scores[:, deciding, tiles] = best
                else:
                    kernel.best_kernel[(found.shape[2], deciding.stop - deciding.start, batch)](
                        found, order if listed is None else listed, order, scores, n_tiles, tiles.start,
                        deciding.start, heads // together, columns, width, geometry.n_blocks, GROUP=together,
                        LISTED=listed is not None, CHUNK=launch.select_chunk(columns),
                        **launch.select_sizes(columns, width, _arch(q.device)),
                    )  # fmt: skip

    tuning.run(_call(name, q, k, k), run)
    return order, scores


def _scores_at(best: Tensor, ranks: Tensor) -> Tensor:
    """The scores at some ranks, from the numbers of the best blocks."""
    out = torch.empty(ranks.shape, device=ranks.device)
    sizes = launch.select_sizes(best.shape[-1], 1, _arch(best.device))
    with _running(best.device) as kernel:
        kernel.nth_kernel[(math.prod(best.shape[:3]),)](
            best, ranks.contiguous(), out, best.shape[-1], SPAN=sizes["SPAN"], RANKS=ranks.shape[-1],
            num_warps=sizes["num_warps"],
        )  # fmt: skip
    return out


def gather_kept(ranked: Ranked, counts: Tensor, geometry: Geometry, sinks: int, width: int) -> Tensor:
    if isinstance(ranked, ranking.Best):
        batch, heads, n_tiles = counts.shape
        kept = torch.empty(batch, heads, n_tiles, width, dtype=torch.int32, device=counts.device)
        with _running(counts.device) as kernel:
            kernel.keep_kernel[(n_tiles, heads, batch)](
                ranked.order, ranked.scores, counts.contiguous(), tables(geometry, counts.device).plan, kept, n_tiles,
                geometry.n_blocks, ranked.order.shape[-1], width, sinks, BLOCK=geometry.block,
                **launch.select_sizes(ranked.order.shape[-1], width, _arch(ranked.order.device)),
            )  # fmt: skip
        return kept
    return ranking.gather_kept(ranked, counts, tables(geometry, counts.device).geometry, sinks, width)


def attend(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | None, geometry: Geometry, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    problem = _dim_problem("value", v.shape[3])
    if problem is not None:
        raise ValueError(f"backend 'triton' cannot run here: {problem}")
    here = tables(geometry, q.device)
    out, lse = empty_outputs(q.float() if _wide(q) else q, v)  # the interpreter cuts float32 off where it should round
    if here.blocks.shape[0]:
        path = _few if q.shape[2] <= FEW_ROWS and geometry.n_tiles == 1 else _many
        path(q, k, v, selection, geometry, here, _factors(scale, softcap), out, lse)
    return out.to(q.dtype), lse


def _factors(scale: float, softcap: float) -> tuple[float, float]:
    """What products are multiplied with before and after the softcap, so that logits come out in base 2."""
    log2_e = math.log2(math.e)
    return (2 * log2_e * scale / softcap, log2_e * softcap) if softcap else (log2_e * scale, 0.0)


def _constants(q: Tensor, v: Tensor, block: int, rows: int, outer: float) -> dict[str, Any]:
    arch, dtype = _arch(q.device), launch.DTYPES[q.dtype]
    head, tail = launch.slices(q.shape[3])
    part, parts, rest = launch.value_slices(arch, v.shape[3], rows)
    return {
        "BLOCK": block, "DIM": q.shape[3], "HEAD": head, "TAIL": tail,
        "V_DIM": v.shape[3], "V_PART": part, "V_PARTS": parts, "V_TAIL": rest, "SOFTCAP": outer != 0,
        "WIDE": _wide(q), "PRECISION": launch.precision(arch, dtype), "SLICE": launch.step(arch, q.shape[3], dtype),
    }  # fmt: skip


def _many(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | None, geometry: Geometry, here: Tables,
    factors: tuple[float, float], out: Tensor, lse: Tensor, paging: Paging | None = None,
) -> None:  # fmt: skip
    """Tile by tile, into the tiles' rows of `out [B, H, M, Dv]` (of last stride 1) and of `lse [B, H, M]`."""
    batch, heads, rows, _ = q.shape
    if selection is None:
        kept = counts = here.plan  # not read
        strides: tuple[int, ...] = (0,) * 6
        width = 0
    else:
        kept = selection.lists if selection.lists.stride(3) == 1 else selection.lists.contiguous()
        # No further than there are blocks, should a rule of one's own count wrongly: nothing else checks on the device.
        listed = selection.counts.minimum((kept < geometry.n_blocks).sum(-1))
        counts = torch.where(selection.unlisted, here.visible[:, None], listed).to(torch.int32)
        width = kept.shape[3]
        strides = (*kept.stride()[:3], *counts.stride())
    group = heads // k.shape[1]
    sharing = group > 1 and selection is not None and selection.group % group == 0

    def run(chosen: launch.Launch) -> None:
        span = launch.fit(chosen.rows, geometry.tile)
        packed = min(chosen.rows // span, launch.power_above(group)) if sharing else 1
        part = span * packed
        grid = (geometry.n_tiles * -(-geometry.tile // span), k.shape[1] * -(-group // packed), batch)
        keys = launch.fit(chosen.keys, geometry.block)
        constants = _constants(q, v, geometry.block, part, factors[1])
        boxed = boxes.of(k, v, keys, constants) if chosen.tma and paging is None else None
        with _running(q.device) as kernel:
            kernel.attend_kernel[grid](
                q, k, v, *(boxed or (k, v)), out, lse, kept, counts, here.ordinals, here.plan,
                here.plan if paging is None else paging.table,
                *q.stride(), *k.stride(), *v.stride(), *out.stride()[1:3], *strides,
                geometry.n_tiles, rows, group, width, *factors, PAGED=0 if paging is None else paging.blocks,
                TILE=geometry.tile, ROWS=part, HEADS=packed, KEYS=keys, LISTED=selection is not None,
                STAGES=chosen.num_stages, TMA=boxed is not None, **constants,
                num_warps=chosen.num_warps, num_stages=chosen.num_stages,
            )  # fmt: skip

    paged = None if paging is None else geometry
    tuning.run(_call("packed" if sharing else "attend", q, k, v, selection, paged), run)


def _few(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | None, geometry: Geometry, here: Tables,
    factors: tuple[float, float], out: Tensor, lse: Tensor, paging: Paging | None = None,
) -> None:  # fmt: skip
    """The blocks split over programs, into contiguous `out [B, H, M, Dv]` and `lse [B, H, M]`: of the one tile of each
    batch row or, on pages and without a selection, of a plan's B tiles of at most M rows."""
    batch, heads, rows, _ = out.shape
    kv_heads, v_dim = k.shape[1], v.shape[3]
    group, n_blocks = heads // kv_heads, geometry.n_blocks
    blocks = counts = members = here.plan  # not read where there is no selection
    most = n_blocks
    if selection is not None:
        blocks, counts, members = _union(selection, kv_heads)
        most = min(n_blocks, group * selection.lists.shape[3])

    def run(chosen: launch.Launch) -> None:
        piles = kv_heads * -(-group * rows // chosen.rows)
        splits = _splits(batch * piles, most, q.device)
        parts = torch.empty(batch, heads, rows, splits, v_dim, device=q.device)
        sums = torch.empty(batch, heads, rows, splits, device=q.device)
        merge = tuning.choose(_call("merge", q, k, v, selection))
        with _running(q.device) as kernel:
            kernel.few_kernel[(splits, piles, batch)](
                q, k, v, parts, sums, blocks, counts, members, here.plan, here.plan if paging is None else paging.table,
                *q.stride(), *k.stride(), *v.stride(), rows, group, n_blocks, *factors,
                PAGED=0 if paging is None else paging.blocks, ROWS=chosen.rows,
                KEYS=launch.fit(chosen.keys, geometry.block),
                SPLITS=splits, LISTED=selection is not None, STAGES=chosen.num_stages,
                **_constants(q, v, geometry.block, chosen.rows, factors[1]),
                num_warps=chosen.num_warps, num_stages=chosen.num_stages,
            )  # fmt: skip
            kernel.merge_kernel[(batch * heads * rows,)](
                parts, sums, out, lse, SPLITS=splits, WAYS=splits, V_DIM=v_dim,
                WIDTH=launch.padded(v_dim), num_warps=merge.num_warps, num_stages=merge.num_stages,
            )  # fmt: skip

    tuning.run(_call("few", q, k, v, selection, None if paging is None else geometry), run)


def _union(selection: Selection, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the only tile: the blocks that any head of a group keeps, ascending, how many, and which head keeps which."""
    members = selection.kept_mask((slice(None), slice(None), 0)).to(torch.int8).contiguous()
    any_head = torch.unflatten(members, 1, (kv_heads, -1)).amax(2)
    # A stable sort by "not kept" leaves the kept blocks first, ascending.
    blocks = (1 - any_head).sort(dim=-1, stable=True).indices.to(torch.int32)
    return blocks.contiguous(), any_head.sum(-1, dtype=torch.int32), members


def _splits(programs: int, blocks: int, device: torch.device) -> int:
    """How many programs share one row's blocks: enough to fill the device twice, at least two blocks each."""
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    wanted = max(1, min(2 * units // programs, blocks // 2, 64))
    return 1 << (wanted.bit_length() - 1)
