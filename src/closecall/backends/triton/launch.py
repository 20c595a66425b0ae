"""How each kernel is launched: rows and keys per step, warps and pipeline stages, by architecture.

The table's entries were chosen by compiling for every architecture (`closecall gpu-report`): shared memory within the
device's, keys and values of later turns on their way while one turn is worked on, and as many thread blocks at a time
as that leaves room for. The variants that `make audit` compiles use no stack. None was timed on a device. Two ways to
do better on yours:

* `CLOSECALL_LAUNCH='{"attend": {"num_warps": 8}}'` overrides fields of a kernel's launch;
* `CLOSECALL_AUTOTUNE=1` times the table's neighbours at the first call of each kind and keeps the fastest (tuning.py).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from dataclasses import dataclass
from typing import Any

import torch

from ...registry import unknown
from ...scorers.base import Planes

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
SMALL = ("sm_86", "sm_89", "sm_120")  # 99 KiB of shared memory for a thread block, where sm_80 has 163
KERNELS = ("summaries", "outliers", "scores", "sums", "shares", "again", "attend", "packed", "few", "merge")
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
LARGEST_DIM = 256
MOST_SPAN = 16384  # scores of a tile that the select kernels hold in registers: a million tokens in blocks of 64
MOST_CHUNK = 2048  # of them, those whose places and addresses there are registers for at a time
MOST_KEYS = 128  # of one step, tuned launches included
# Parts that a mean key is stored in, and the power of two between them: together they hold float32's 24 bits.
MEAN_PARTS = {"fp32": (1, 0), "fp16": (2, 11), "bf16": (3, 0)}
# Values of a key that are attended to where only the log-sum-exp is wanted: no fewer than tensor cores take.
FORCED_VALUES = 16


@dataclass(frozen=True)
class Launch:
    """`rows` of queries and `keys` of one step. Of `packed`, rows are of all heads that share their blocks; of
    `scores`, `sums`, `shares` and `again`, keys are block columns; `summaries`, `outliers` and `merge` have no rows.
    `tma` has `attend` and `packed` read keys and values by the copy engine, where it can (`boxes`)."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    tma: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.tma, bool):
            raise ValueError(f"launch field tma must be true or false, got {self.tma!r}")
        for name, value in dataclasses.asdict(self).items():
            if name == "tma":
                continue
            least = 16 if name in ("rows", "keys") else 1
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or value < least or (name != "num_stages" and value & (value - 1)):
                power = "" if name == "num_stages" else "a power of two, "
                raise ValueError(f"launch field {name} must be {power}at least {least}, got {value!r}")


def slices(dim: int) -> tuple[int, int]:
    """Powers of two (head, tail) that a head dim is worked on in; tail 0 where one slice does, padded if need be."""
    head = 1 << (dim.bit_length() - 1)
    tail = dim - head
    if head >= 16 and (tail == 0 or (tail >= 16 and tail & (tail - 1) == 0)):
        return head, tail
    return max(16, 1 << (dim - 1).bit_length()), 0


def arch(major: int, minor: int) -> str:
    """The entry for an NVIDIA device: of its own kind, or of the one with the least shared memory."""
    own = {(8, 0): "sm_80", (8, 7): "sm_80", (8, 9): "sm_89"}
    return own.get((major, minor)) or {9: "sm_90", 10: "sm_100", 12: "sm_120"}.get(major, "sm_86")


def value_slices(arch: str, dim: int, rows: int) -> tuple[int, int, int]:
    """(part, parts, tail): a value dim as `parts` slices of one width, and a narrower one of `tail` or 0.

    Where each warp multiplies by itself (`mma.sync`) no slice is wider than there are rows: Triton lays a wider product
    out with warps side by side, and then every maximum and sum of the softmax crosses warps through shared memory. With
    fewer than 64 rows four warps share rows anyway. Elsewhere 128 is what registers hold.
    """
    head, tail = slices(dim)
    part = min(head, {"sm_90": 256, "gfx942": 256, "sm_100": 128}.get(arch, 64 if rows >= 64 else 128))
    return part, (head + (tail if tail % part == 0 else 0)) // part, tail if tail % part else 0


def boxes(arch: str, head_dim: int, value_dim: int, dtype: str) -> bool:
    """Whether keys and values may be brought by the copy engine (TMA): it is there, and a head is whole slices of
    16-bit numbers. Below 128 columns its loop is no better on paper (docs/gpu.md): its barriers' few bytes of shared
    memory cost a thread block, or it takes a stack. What tensors it can read, `boxes.of` says."""
    whole = all(slices(dim) == (dim, 0) and dim >= 128 for dim in (head_dim, value_dim))
    return arch in ("sm_90", "sm_100") and whole and dtype != "fp32"


def power_above(n: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (n - 1).bit_length()


def padded(dim: int) -> int:
    """The power of two that holds a head dim, at least what tensor cores take."""
    return max(16, power_above(dim))


def fit(wanted: int, there: int) -> int:
    """A power of two of at most `wanted` that covers `there`, but no less than tensor cores take."""
    return min(wanted, padded(there))


def score_rows(pool: int, runs: int, rows: int) -> dict[str, int]:
    """How the score kernels' ROWS are shared: RUNS rows of each of TILES tiles, or ROWS at a time of one tile's."""
    tiles = max(1, rows // runs) if pool > 1 else 1
    return {"RUNS": runs, "TILES": tiles, "ROWS": rows if tiles > 1 else fit(rows, runs)}


def layout(planes: Planes, dtype: str) -> dict[str, int]:
    """How a block's vectors lie in planes: PLANES for what stands for its keys, and one for each outlying key.

    A mean that is not rounded has more bits than the type, and takes several.
    """
    parts, shift = (2 if planes.box else 1), 0
    if not planes.rounded:
        parts, shift = MEAN_PARTS[dtype]
    return {"BOX": planes.box, "VECTORS": (planes.outliers or 0) + 1, "PLANES": parts, "SHIFT": shift}


def scoring(vectors: int, normalised: bool) -> str:
    """The name of the score kernel's launch: it holds more at a time for several vectors, and for shares of a row."""
    return "shares" if normalised or vectors > 1 else "scores"


def table(kernel: str, arch: str, head_dim: int, value_dim: int, dtype: str) -> Launch:
    """The table itself, without overrides. What is not told apart by architecture came out the same for all."""
    wide = max(sum(slices(head_dim)), sum(slices(value_dim)))
    full = dtype == "fp32"
    if kernel in ("summaries", "merge"):
        return Launch(rows=16, keys=32, num_warps=4, num_stages=1)
    if kernel == "outliers":
        return Launch(rows=16, keys=16, num_warps=4, num_stages=1)
    if kernel == "scores":
        return Launch(32, 16, 4, 2) if full else Launch(64, 64, 4, 3)
    if kernel == "sums":
        if full:
            return Launch(32, 16, 4, 2) if arch == "sm_100" else Launch(64, 16, 8, 2)
        return Launch(64, 64, 4, 3)
    if kernel in ("shares", "again"):
        return Launch(32, 16, 4, 2) if full else Launch(64, 64, 4, 3)
    if kernel == "few":
        narrow = full or (arch in ("sm_80", "sm_100", *SMALL) and wide > 192)  # more keys would need a stack
        stages = {"gfx942": 2}
        if full:  # where three need a stack, at some sizes
            stages |= {"sm_80": 2, "sm_100": 4}
        return Launch(16, 16 if narrow else 64 if wide <= 64 else 32, 4, stages.get(arch, 3))
    if kernel == "packed" and not full and _packs(arch, wide):
        return Launch(128, _packed_keys(arch, wide), 8, 3)
    # Attention. A third stage is what gives keys and values a whole turn to arrive in.
    if full:
        deep = 2 if arch == "gfx942" and wide > 192 else 3  # 64 KiB
        return Launch(32, 32 if wide <= 64 else 16, 4, 3) if wide <= 128 else Launch(16, 16, 4, deep)
    if arch == "gfx942":
        return Launch(64, 32 if wide <= 96 else 16, 4, 3)
    if arch in SMALL:  # two thread blocks at a time, as far as that goes
        return Launch(64, 64 if wide <= 64 else 32 if wide <= 128 else 16, 4, 3)
    if arch == "sm_100" and wide in (96, 192):
        return Launch(64, 32, 4, 2 if wide == 192 and value_dim == 192 else 3)
    if wide <= 128:
        return Launch(64, 64, 4, 3)
    crowded = arch == "sm_80" and (wide > 192 or sum(slices(value_dim)) > 128)  # the same
    return Launch(64, 16 if crowded else 32, 4, 3)


def _packs(arch: str, wide: int) -> bool:
    """Whether there is room for the rows of two heads. Between 64 and 128 columns they need a stack, except on sm_90
    and AMD; above 128, sm_100 has too little tensor memory."""
    return arch in ("sm_90", "gfx942") or wide <= 64 or wide == 128 or (wide > 128 and arch != "sm_100")


def _packed_keys(arch: str, wide: int) -> int:
    """Keys of a turn where 128 rows of two heads meet them."""
    if arch in SMALL:
        return 64 if wide <= 64 else 32 if wide <= 128 else 16
    if arch == "gfx942":
        return 32 if wide <= 96 else 16
    return 64 if wide <= 128 else 16 if arch == "sm_80" and wide > 192 else 32


def select_sizes(n: int, room: int, arch: str) -> dict[str, int]:
    """SPAN and SLOTS that hold n scores and `room` kept blocks, and warps for at most 32 scores a thread."""
    span = padded(n)
    each = 512 if arch == "sm_120" and span == 2048 else 256  # scores of a warp; there 256 need a stack
    return {"SPAN": span, "SLOTS": padded(room), "num_warps": min(16, max(1, span // each))}


def select_chunk(n: int) -> int:
    """Blocks of a row of n that the best kernel writes at a time."""
    return min(MOST_CHUNK, padded(n))


def precision(arch: str, dtype: str) -> str:
    """How float32 products are made. NVIDIA's tensor cores take 11 bits of each factor, so two parts of each are
    multiplied: that leaves an error of about 2^-21 of each product. AMD's take float32 as it is."""
    return "tf32x3" if dtype == "fp32" and arch.startswith("sm_") else "ieee"


def step(arch: str, head_dim: int, dtype: str) -> int:
    """Columns of a product at a time; 0 for all at once. Rows of many float32, each as two parts, are more than
    NVIDIA's registers hold."""
    if precision(arch, dtype) == "ieee" or head_dim <= 64:
        return 0
    return next((n for n in (32, 16) if head_dim % n == 0), 0)


def score_slice(dim: int, dtype: str) -> int:
    """Columns of a score's product at a time where rows do not stay in registers."""
    most = 32 if dtype == "fp32" else 64
    return next((n for n in (most, 32) if dim % n == 0), min(most, padded(dim)))


# Shared memory that a thread block may have, in bytes.
SHARED = dict.fromkeys(SMALL, 99 * 1024) | {"sm_80": 163 * 1024, "gfx942": 64 * 1024}
SHARED |= dict.fromkeys(("sm_90", "sm_100"), 227 * 1024)


GROUPS = ("sm_90", "sm_100")  # where groups of warps multiply


def _forms(arch: str, told: dict[str, int]) -> int:
    """In how many forms rows stay in shared memory whole: as they are, in the two that meet a box's sides, or both."""
    return 0 if arch == "gfx942" else (2 if told["BOX"] else 0) + (not told["BOX"] or told["VECTORS"] > 1)


def _fits(arch: str, dim: int, told: dict[str, int], rows: int, keys: int, stages: int) -> bool:
    """Whether there is shared memory for rows of 16-bit numbers, and as many turns' blocks as there are stages, less
    one where warps multiply by themselves."""
    turns = stages if arch in GROUPS else max(1, stages - 1)
    planes = told["PLANES"] + told["VECTORS"] - 1
    return 2 * padded(dim) * (_forms(arch, told) * rows + turns * planes * keys) + 1024 <= SHARED[arch]


def sums_sizes(
    arch: str, dim: int, dtype: str, told: dict[str, int], chosen: Launch, listed: bool = False
) -> dict[str, int]:
    """What of a launch the sums kernel has room for, as `score_sizes` says of the score kernel. Whole rows are no
    fewer than blocks here: else warps would share rows, and every step of a row's sum would cross them."""
    rows, keys, stages = chosen.rows, chosen.keys, chosen.num_stages
    if dtype == "fp32":
        if listed and told["VECTORS"] > 1 and padded(dim) > 64:
            rows = min(rows, 32)  # more would need a stack, as would wider slices
        narrow = arch == "sm_120" or (arch == "sm_100" and told["VECTORS"] > 1)
        part = 16 if narrow and listed and dim % 16 == 0 else score_slice(dim, dtype)
        return {"ROWS": rows, "KEYS": keys, "STAGES": stages, "SLICE": part}
    if padded(dim) > 128 and arch in SMALL:  # shared memory does not hold whole rows
        return {"ROWS": rows, "KEYS": min(keys, 32), "STAGES": 2, "SLICE": score_slice(dim, dtype)}
    if arch in ("sm_100", "sm_120") and padded(dim) <= 64 and told["VECTORS"] > 1:
        keys = min(keys, 32)  # more would need a stack
    while not _fits(arch, dim, told, rows, keys, stages):
        if keys > 32:
            keys //= 2
        elif stages > 2:
            stages -= 1
        elif keys > 16:
            keys //= 2
        else:
            break
    return {"ROWS": rows, "KEYS": keys, "STAGES": stages, "SLICE": padded(dim)}


def score_sizes(
    arch: str, dim: int, dtype: str, told: dict[str, int], chosen: Launch, listed: bool = False
) -> dict[str, int]:
    """What of a launch the score kernel has room for: ROWS that see all blocks at a time, in a SLICE of their columns,
    KEYS blocks a turn and STAGES of them. `told` is the scorer's `layout`, and `listed` means the again kernel. float32
    in two parts has no room for whole rows, and is read anew for every turn."""
    rows, keys, stages = chosen.rows, chosen.keys, chosen.num_stages
    if dtype == "fp32":
        # A box needs its rows twice, for which slices of 32 columns are too wide. Heads of more than 192, and a box
        # beside outlying keys, come out the other way round: there slices of 16 need a stack.
        narrow = arch in GROUPS and told["BOX"] and told["VECTORS"] == 1 and dim <= 192
        part = 16 if narrow else score_slice(dim, dtype)
        if told["VECTORS"] > 1 and padded(dim) <= 64 and arch != "gfx942":  # here whole rows need no stack, slices do
            part = padded(dim)
        # With a list two come out the other way round once more.
        boxed_keys = told["BOX"] and told["VECTORS"] > 1 and padded(dim) <= 64
        if listed and boxed_keys and arch in ("sm_80", "sm_86", "sm_89", "sm_100"):
            part = 16
        if listed and not told["BOX"] and dim > 192 and arch in ("sm_80", "sm_86", "sm_89"):
            part = 16
        return {"ROWS": rows, "KEYS": keys, "STAGES": stages, "SLICE": part}
    forms, planes = _forms(arch, told), told["PLANES"] + told["VECTORS"] - 1
    if arch in SMALL and padded(dim) > 128:
        rows = min(rows, 16)  # more would need a stack
    wide = padded(dim) > 64
    if not wide and told["VECTORS"] > 3 and arch in ("sm_80", "sm_86", "sm_89"):
        rows = min(rows, 32)  # likewise
    crowded = planes > 3 and {"sm_80": wide, "sm_100": wide and listed, "sm_120": not wide}.get(arch, False)
    if crowded or (arch == "sm_100" and padded(dim) > 128 and told["BOX"]):
        keys = min(keys, 32)  # likewise
    while not _fits(arch, dim, told, rows, keys, stages):
        if forms and rows > 32:
            rows //= 2
        elif keys > 32 and arch != "sm_90":  # whose warp groups take no fewer than 64 blocks
            keys //= 2
        elif stages > 2:
            stages -= 1
        elif forms and rows > 16:
            rows //= 2
        elif keys > 16:
            keys //= 2
        else:
            break
    return {"ROWS": rows, "KEYS": keys, "STAGES": stages, "SLICE": padded(dim)}


def overrides() -> dict[str, dict[str, Any]]:
    """What `CLOSECALL_LAUNCH` says, checked."""
    text = os.environ.get("CLOSECALL_LAUNCH")
    return _parse(text) if text else {}


@functools.lru_cache(maxsize=16)
def _parse(text: str) -> dict[str, dict[str, Any]]:
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f'CLOSECALL_LAUNCH is not JSON ({error}): write \'{{"attend": {{"num_warps": 8}}}}\''
        ) from None
    if not isinstance(given, dict) or not all(isinstance(fields, dict) for fields in given.values()):
        raise ValueError(f"CLOSECALL_LAUNCH must hold an object of objects, kernel: {{field: number}}, got {text}")
    known = [f.name for f in dataclasses.fields(Launch)]
    for kernel, fields in given.items():
        if kernel not in KERNELS:
            raise unknown("kernel in CLOSECALL_LAUNCH", kernel, KERNELS)
        for field in fields:
            if field not in known:
                raise unknown("launch field in CLOSECALL_LAUNCH", field, known)
        dataclasses.replace(Launch(16, 16, 1, 1), **fields)  # raises for a bad number
    return given
