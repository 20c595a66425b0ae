"""The Triton backend: block summaries, tile scores, attention and decode on CUDA and ROCm devices (in kernels/).

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

import math
from typing import Any

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
from . import attending, device, launch, scoring, tuning
from . import rank as ranking
from .device import why_not as why_not  # part of what a backend offers
from .tables import Paging, Tables, tables

_REDUCTIONS = {(Of.SCORES, False), (Of.SCORES, True), (Of.MASS, False), (Of.MASS, True), (Of.SOFTMAX, False)}


def _summarise(k: Tensor, planes: Planes, here: Tables, block: int) -> tuple[Tensor, dict[str, Any]]:
    """Summaries `[Hkv, planes, slots, width]` and what the score kernels must know about them."""
    outliers = planes.outliers is not None
    shrink = 1.0 if planes.shrink is None else planes.shrink
    vectors = (planes.outliers or 0) + 1
    slots, dim = here.blocks.shape[0], k.shape[3]
    width = launch.padded(dim)
    told = launch.layout(planes, launch.DTYPES[k.dtype]) | {"WIDTH": width, "DIM": dim}
    chosen = tuning.choose(device.call("outliers" if outliers else "summaries", k, k, k))
    keys = launch.fit(chosen.keys, block)
    common = {"KEYS": keys, "STEPS": -(-block // keys), "num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    # The interpreter cuts float32 off where it should round: there torch rounds what is not split into parts.
    dtype = torch.float32 if planes.rounded and device.wide(k) else k.dtype
    shape = (k.shape[1], told["PLANES"] + vectors - 1, slots, width)
    # The score kernel reads whole steps, without a mask, and so a little beyond the last block.
    everything = k.new_empty(math.prod(shape) + launch.MOST_KEYS * width, dtype=dtype)
    out = everything[: math.prod(shape)].view(shape)
    with device.running(k.device) as kernel:
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
    out, lse = empty_outputs(q.float() if device.wide(q) else q, v)
    attending.many(q, k, v, selection, geometry, here, attending.factors_of(scale, 0.0), out, lse, paging)
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
    with device.running(q.device) as kernel:
        wide = told | {"WIDE": device.wide(q)}
        scored = scoring.scored(kernel, q, own, policy, every_row, planes, geometry, here, wide, device.arch(q.device))
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
            with device.running(q.device) as kernel:
                for rows in scored:
                    rows.add_up(kernel, chosen, policy.sinks, scale)

        tuning.run(device.call("sums", q, k, k), add_up)

    def run(chosen: launch.Launch) -> None:
        packed = scored[0].tiles(chosen)
        with device.running(q.device) as kernel:
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
                        **launch.select_sizes(columns, width, device.arch(q.device)),
                    )  # fmt: skip

    tuning.run(device.call(name, q, k, k), run)
    return order, scores


def _scores_at(best: Tensor, ranks: Tensor) -> Tensor:
    """The scores at some ranks, from the numbers of the best blocks."""
    out = torch.empty(ranks.shape, device=ranks.device)
    sizes = launch.select_sizes(best.shape[-1], 1, device.arch(best.device))
    with device.running(best.device) as kernel:
        kernel.nth_kernel[(math.prod(best.shape[:3]),)](
            best, ranks.contiguous(), out, best.shape[-1], SPAN=sizes["SPAN"], RANKS=ranks.shape[-1],
            num_warps=sizes["num_warps"],
        )  # fmt: skip
    return out


def gather_kept(ranked: Ranked, counts: Tensor, geometry: Geometry, sinks: int, width: int) -> Tensor:
    if isinstance(ranked, ranking.Best):
        batch, heads, n_tiles = counts.shape
        kept = torch.empty(batch, heads, n_tiles, width, dtype=torch.int32, device=counts.device)
        with device.running(counts.device) as kernel:
            kernel.keep_kernel[(n_tiles, heads, batch)](
                ranked.order, ranked.scores, counts.contiguous(), tables(geometry, counts.device).plan, kept, n_tiles,
                geometry.n_blocks, ranked.order.shape[-1], width, sinks, BLOCK=geometry.block,
                **launch.select_sizes(ranked.order.shape[-1], width, device.arch(ranked.order.device)),
            )  # fmt: skip
        return kept
    return ranking.gather_kept(ranked, counts, tables(geometry, counts.device).geometry, sinks, width)


def attend(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | None, geometry: Geometry, scale: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    problem = device.dim_problem("value", v.shape[3])
    if problem is not None:
        raise ValueError(f"backend 'triton' cannot run here: {problem}")
    here = tables(geometry, q.device)
    # The interpreter cuts float32 off where it should round.
    out, lse = empty_outputs(q.float() if device.wide(q) else q, v)
    if here.blocks.shape[0]:
        path = attending.few if q.shape[2] <= attending.FEW_ROWS and geometry.n_tiles == 1 else attending.many
        path(q, k, v, selection, geometry, here, attending.factors_of(scale, softcap), out, lse)
    return out.to(q.dtype), lse
