"""Every kernel variant that the launch table can ask for, in the form that Triton's ahead-of-time compiler takes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...registry import unknown
from ...scorers.base import Planes
from . import launch
from .kernels import again, attend, few, pool, scores, select, summaries, sums

# (head dim, value dim): the head dims of the models that are supported by name, and DeepSeek's two.
DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))
FLOATS = ("fp16", "bf16", "fp32")
HALF_DIM = 128  # float16 is compiled at this head dim alone: its code is bfloat16's but for the kind of product
PAGED_DIMS = ((64, 64), (128, 128))  # what else there is over pages is compiled for these
SOFTCAPPED = ((128, 128), (256, 256))
# Planes by name, and those that are compiled for fewer head dims, like row-normalised reductions.
PLANES = {"mean": Planes(box=False), "quest": Planes(box=True)}
MORE_PLANES = {
    "box": Planes(box=True, shrink=0.5),
    "outliers-1": Planes(box=False, outliers=1),
    "outliers-3": Planes(box=False, outliers=3),
    "boxed-outliers-1": Planes(box=True, shrink=0.5, outliers=1),
}
SOFTMAX_PLANES = (PLANES["quest"], MORE_PLANES["boxed-outliers-1"])
MORE_DIMS = (64, 128)
KINDS = ("", " pooled", " again")  # a tile by its rows, several by their means, a tile's candidates by its rows
POOL, OUTLYING = 8, 8  # rows per mean and outlying rows of the variants that pool
# Rows that the select kernels hold: blocks of a tile (128K and 1M tokens), and kept ones.
SELECT_BLOCKS = (2048, launch.MOST_SPAN)
SELECT_KEPT = 132
SELECT_LISTED = 264  # candidates
# Attention to forced blocks, for the log-sum-exp alone.
FORCED_DIMS = tuple((dim, launch.FORCED_VALUES) for dim in MORE_DIMS)


@dataclass(frozen=True)
class Variant:
    """One kernel as compiled for one architecture: arguments by name, constants, and launch options."""

    name: str
    arch: str
    kernel: Any  # a triton JITFunction
    signature: dict[str, str]
    constexprs: dict[str, object]
    attrs: dict[tuple[int, ...], list[list[object]]]
    num_warps: int
    num_stages: int
    pipelined: bool  # whether the main loop is expected to overlap its loads with its products
    head_dim: int
    value_dim: int
    dtype: str


def _variant(
    name: str, arch: str, kernel: Any, types: dict[str, str], constants: dict[str, object], chosen: launch.Launch,
    dims: tuple[int, int], dtype: str, pipelined: bool,
) -> Variant:  # fmt: skip
    """Arguments that `types` does not name are 32-bit integers; those but the sizes are multiples of 16, like pointers
    and the strides of usual tensors."""
    signature = {a: "constexpr" if a in constants else types.get(a, "i32") for a in kernel.arg_names}
    sizes = {
        "n_tiles",
        "q_len",
        "group",
        "n_blocks",
        "n_slots",
        "n_listed",
        "together",
        "sentinel",
        "first_pack",
        "first_tile",
        "some_tiles",
        "first_head",
        "n_heads",
        "sinks",
        "width",
        "room",
    }
    aligned = [
        i for i, (a, kind) in enumerate(signature.items()) if kind.startswith("*") or (kind == "i32" and a not in sizes)
    ]
    return Variant(
        name=name, arch=arch, kernel=kernel, signature=signature, constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
        num_warps=chosen.num_warps, num_stages=chosen.num_stages, pipelined=pipelined,
        head_dim=dims[0], value_dim=dims[1], dtype=dtype,
    )  # fmt: skip


def _name(kernel: str, dims: tuple[int, int], dtype: str) -> str:
    kernel += " forced" if dims in FORCED_DIMS else ""
    return f"{kernel} D{dims[0]}" + (f"/{dims[1]}" if dims[1] != dims[0] else "") + f" {dtype}"


def _common(arch: str, dims: tuple[int, int], dtype: str, chosen: launch.Launch) -> dict[str, object]:
    head, tail = launch.slices(dims[0])
    part, parts, rest = launch.value_slices(arch, dims[1], chosen.rows)
    return {
        "q_d": 1, "k_d": 1, "v_d": 1, "BLOCK": 64, "ROWS": chosen.rows, "KEYS": chosen.keys,
        "DIM": dims[0], "HEAD": head, "TAIL": tail, "V_DIM": dims[1], "V_PART": part, "V_PARTS": parts, "V_TAIL": rest,
        "LISTED": True, "SOFTCAP": False, "WIDE": False, "PRECISION": launch.precision(arch, dtype),
        "SLICE": launch.step(arch, dims[0], dtype), "STAGES": chosen.num_stages, "PAGED": 0,
    }  # fmt: skip


def _boxes(constants: dict[str, object], dtype: str) -> dict[str, str]:
    """Descriptors of keys and values, as `boxes.of` makes them."""
    widths = {"k_box": constants["HEAD"], "v_box": constants["V_PART"]}
    return {name: f"tensordesc<{dtype}[1,1,{constants['KEYS']},{width}]>" for name, width in widths.items()}


def _attend(arch: str, dims: tuple[int, int], dtype: str) -> Iterator[Variant]:
    chosen = launch.table("attend", arch, *dims, dtype)
    x = f"*{dtype}"
    types = {"q": x, "k": x, "v": x, "k_box": x, "v_box": x, "out": x, "lse": "*fp32", "kept": "*i32"}
    types |= {"counts": "*i32", "plan": "*i32", "ordinals": "*i32", "table": "*i32", "inner": "fp32", "outer": "fp32"}
    kinds: dict[str, dict[str, object]] = {"attend": {}}
    boxed = dtype == "bf16" and dims not in FORCED_DIMS and launch.boxes(arch, *dims, dtype)
    if boxed:
        kinds["attend tma"] = {"TMA": True}
        kinds["attend tma dense"] = {"TMA": True, "LISTED": False}
    if dtype == "bf16" and dims not in FORCED_DIMS:  # the same kernel without a list of blocks, and as Gemma 2 calls it
        kinds["attend dense"] = {"LISTED": False}
        kinds["attend paged"] = {"PAGED": 1}
        if dims in PAGED_DIMS:
            kinds["attend paged dense"] = {"LISTED": False, "PAGED": 1}
            kinds["attend paged by two"] = {"PAGED": 2}
        if dims in SOFTCAPPED:
            kinds["attend softcap"] = {"SOFTCAP": True}
    for kind, differs in kinds.items():
        constants = _common(arch, dims, dtype, chosen) | {"TILE": 64, "HEADS": 1, "TMA": False} | differs
        name = _name(kind, dims, dtype)
        told = types | (_boxes(constants, dtype) if constants["TMA"] else {})
        yield _variant(name, arch, attend.attend_kernel, told, constants, chosen, dims, dtype, pipelined=True)
    if dtype != "fp32" and dims not in FORCED_DIMS:  # float32 has no room for the rows of two heads
        chosen = launch.table("packed", arch, *dims, dtype)
        for kind, tma in {"attend packed": False, "attend tma packed": True}.items():
            if tma and not boxed:
                continue
            constants = _common(arch, dims, dtype, chosen) | {"TILE": 64, "HEADS": chosen.rows // 64, "TMA": tma}
            told = types | (_boxes(constants, dtype) if tma else {})
            name = _name(kind, dims, dtype)
            yield _variant(name, arch, attend.attend_kernel, told, constants, chosen, dims, dtype, pipelined=True)


def _few(arch: str, dims: tuple[int, int], dtype: str) -> Iterator[Variant]:
    chosen = launch.table("few", arch, *dims, dtype)
    x = f"*{dtype}"
    types = {"q": x, "k": x, "v": x, "out": "*fp32", "lse": "*fp32", "blocks": "*i32", "counts": "*i32"}
    types |= {"members": "*i8", "plan": "*i32", "table": "*i32", "inner": "fp32", "outer": "fp32"}
    kinds: dict[str, dict[str, object]] = {"few": {}}
    if dtype == "bf16" and dims in PAGED_DIMS:
        kinds["few paged"] = {"LISTED": False, "PAGED": 1}
    for kind, differs in kinds.items():
        constants = _common(arch, dims, dtype, chosen) | {"SPLITS": 16} | differs
        yield _variant(_name(kind, dims, dtype), arch, few.few_kernel, types, constants, chosen, dims, dtype, False)


def _merge(arch: str, dims: tuple[int, int], dtype: str) -> Iterator[Variant]:
    if dims[0] != dims[1] and dims != FORCED_DIMS[0]:  # the value dim alone matters, and was there already
        return
    chosen = launch.table("merge", arch, *dims, dtype)
    types = {"parts": "*fp32", "sums": "*fp32", "out": f"*{dtype}", "lse": "*fp32"}
    constants: dict[str, object] = {"SPLITS": 16, "WAYS": 16, "V_DIM": dims[1], "WIDTH": launch.padded(dims[1])}
    yield _variant(_name("merge", dims, dtype), arch, few.merge_kernel, types, constants, chosen, dims, dtype, False)


def _summaries(
    name: str, planes: Planes, arch: str, dims: tuple[int, int], dtype: str, told: dict[str, object]
) -> Variant:
    outliers = planes.outliers is not None
    chosen = launch.table("outliers" if outliers else "summaries", arch, *dims, dtype)
    x = f"*{dtype}"
    types = {"k": x, "out": x, "blocks": "*i32", "shrink": "fp32"}
    constants = told | {"k_d": 1, "KEYS": chosen.keys, "STEPS": 64 // chosen.keys, "SHRUNK": planes.shrink is not None}
    kernel = summaries.outliers_kernel if outliers else summaries.summaries_kernel
    constants = {a: constants[a] for a in kernel.arg_names if a in constants}
    return _variant(
        _name(f"summaries {name}", dims, dtype), arch, kernel, types, constants, chosen, dims, dtype, pipelined=False
    )


def _scoring(arch: str, dims: tuple[int, int], dtype: str) -> Iterator[Variant]:
    """Summaries, scores and shares of mass of all scorers; of those whose planes lie alike, as a shrunk box's do like
    Quest's, one is scored for all."""
    if dims[0] != dims[1]:  # they know nothing of values
        return
    x = f"*{dtype}"
    more = dims[0] in MORE_DIMS
    scored: list[dict[str, int]] = []
    for scorer, planes in (PLANES | MORE_PLANES if more else PLANES).items():
        told: dict[str, object] = {"DIM": dims[0], "WIDTH": launch.padded(dims[0])}
        layout = launch.layout(planes, dtype)
        told |= layout
        yield _summaries(scorer, planes, arch, dims, dtype, told)
        if layout in scored:
            continue
        scored.append(layout)
        types = {"q": x, "summaries": x, "plan": "*i32", "packs": "*i32", "forced": "*fp32", "sums": "*fp32"}
        types |= {"out": "*i32", "listed": "*i32", "scale": "fp32"}
        told |= {
            "q_d": 1, "BLOCK": 64, "WIDE": False, "PRECISION": launch.precision(arch, dtype),
            "SLICE": launch.score_slice(dims[0], dtype),
        }  # fmt: skip
        reductions = ("", " mass", " softmax") if planes in SOFTMAX_PLANES else ("", " mass")
        made = itertools.product(KINDS, reductions) if more else [("", ""), (" again", "")]
        for kind, reduction in made:
            mass, softmax = reduction == " mass", reduction == " softmax"
            told |= {"MASS": mass, "MEAN": mass, "SOFTMAX": softmax}
            rows, listed = POOL if kind == " pooled" else 1, kind == " again"
            runs = 64 // rows
            entry = "again" if listed else launch.scoring((planes.outliers or 0) + 1, mass or softmax)
            chosen = launch.table(entry, arch, *dims, dtype)
            sizes = launch.score_sizes(arch, dims[0], dtype, layout, chosen, listed)
            constants = told | sizes | launch.score_rows(rows, runs, sizes["ROWS"])
            chosen = dataclasses.replace(chosen, num_stages=sizes["STAGES"])
            name = _name(f"again {scorer}{reduction}" if listed else f"scores {scorer}{kind}{reduction}", dims, dtype)
            kernel = again.again_kernel if listed else scores.scores_kernel
            yield _variant(name, arch, kernel, types, constants, chosen, dims, dtype, False)
            if not (mass or softmax):
                continue
            chosen = launch.table("sums", arch, *dims, dtype)
            sizes = launch.sums_sizes(arch, dims[0], dtype, layout, chosen, listed)
            constants = told | sizes | launch.score_rows(rows, runs, sizes["ROWS"]) | {"LISTED": listed}
            chosen = dataclasses.replace(chosen, num_stages=sizes["STAGES"])
            constants = {a: x for a, x in constants.items() if a in sums.sums_kernel.arg_names}
            name = _name(f"sums {scorer}{kind}{' softmax' if softmax else ''}", dims, dtype)
            yield _variant(name, arch, sums.sums_kernel, types, constants, chosen, dims, dtype, False)


def _pool(arch: str, dims: tuple[int, int], dtype: str) -> Iterator[Variant]:
    """Means of rows, and outlying rows, with the forced masses that some reductions want of them."""
    if dims[0] != dims[1]:
        return
    types = {"q": f"*{dtype}", "out": f"*{dtype}", "plan": "*i32", "forced": "*fp32", "means": "*fp32"}
    constants: dict[str, object] = {"q_d": 1, "DIM": dims[0], "WIDTH": launch.padded(dims[0]), "FORCED": True}
    constants |= {"POOL": POOL, "RUNS": 64 // POOL, "ROWS": 64 // POOL}
    chosen = launch.Launch(16, 16, 4, 1)
    yield _variant(_name("pool", dims, dtype), arch, pool.pool_kernel, types, constants, chosen, dims, dtype, False)
    constants = constants | {"RUNS": 64 // POOL + OUTLYING, "ROWS": 64, "OUTLYING": OUTLYING}
    types = {name: x for name, x in types.items() if name != "means"} | {"masses": "*fp32"}
    name = _name("outlying", dims, dtype)
    yield _variant(name, arch, pool.outlying_kernel, types, constants, chosen, dims, dtype, False)


def _select(arch: str) -> Iterator[Variant]:
    """The select kernels, which know neither head dims nor types."""
    integers = dict.fromkeys(("scores", "listed", "order", "best", "plan", "kept"), "*i32")
    made = [(f"select best of {n}", select.best_kernel, n) for n in SELECT_BLOCKS]
    made += [("select again", select.best_kernel, SELECT_LISTED)]
    made += [("select keep", select.keep_kernel, SELECT_KEPT), ("select nth", select.nth_kernel, SELECT_KEPT)]
    for name, kernel, n in made:
        sizes: dict[str, int] = launch.select_sizes(n, SELECT_KEPT, arch) | {"CHUNK": launch.select_chunk(n)}
        sizes |= {"BLOCK": 64, "RANKS": 3, "GROUP": 1, "LISTED": n == SELECT_LISTED}
        constants: dict[str, object] = {a: sizes[a] for a in kernel.arg_names if a in sizes}
        types = integers | {"counts": "*i64", "ranks": "*i64", "out": "*fp32"}
        chosen = launch.Launch(16, 16, sizes["num_warps"], 1)
        yield _variant(name, arch, kernel, types, constants, chosen, (0, 0), "int32", False)


def variants(arch: str) -> list[Variant]:
    """What the launch table can choose on `arch`, for the usual grid of 64 by 64."""
    if arch not in launch.ARCHS:
        raise unknown("architecture", arch, launch.ARCHS)
    kinds = (_attend, _few, _merge, _pool, _scoring)
    every = (*DIMS, *FORCED_DIMS)
    wanted = [(dims, dtype) for dims in every for dtype in FLOATS if dtype != "fp16" or dims[0] == HALF_DIM]
    return [v for make in kinds for dims, dtype in wanted for v in make(arch, dims, dtype)] + list(_select(arch))
