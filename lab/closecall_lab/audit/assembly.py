"""Reading what compilers emit: the loops in PTX and AMD assembly, and what happens inside them.

A loop is what compiler books call a natural loop: a jump back to a block that every way to the jump leads through. Text
order is no guide, since compilers put blocks where they like.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Dialect:
    """How an assembly language writes labels, jumps and ends."""

    label: re.Pattern[str]
    jump: re.Pattern[str]  # group 1: set if it may fall through; group 2: where to
    end: re.Pattern[str]
    tensor: re.Pattern[str]  # a tensor-core product; group 1: its kind
    copy: re.Pattern[str]  # an asynchronous copy of whole rows, not of single numbers such as block indices
    load: re.Pattern[str]  # a read of device memory into registers
    scalar: re.Pattern[str]  # a multiply-add of single float32 numbers, which is what IEEE products are made of
    wait: re.Pattern[str]  # for copies or loads; group 1: how many of the latest may still be on their way
    begin: re.Pattern[str] | None  # of bulk copies that go by one barrier in shared memory; group 1: the barrier
    arrive: re.Pattern[str] | None  # a wait for such a barrier; group 1: the barrier
    barrier: re.Pattern[str]  # of the thread block
    share: re.Pattern[str]  # a write to shared memory from registers
    instruction: re.Pattern[str]


PTX = Dialect(
    label=re.compile(r"^(\$L__BB\w+):"),
    jump=re.compile(r"^\s*(@!?%\w+)?\s*bra(?:\.uni)?\s+(\$L__BB\w+)"),
    end=re.compile(r"^\s*(?:ret|exit|trap);"),
    tensor=re.compile(r"\b(mma)\.sync|\b(wgmma)\.mma_async|\b(tcgen05)\.mma\b"),
    # 16 bytes a thread is what the pipeliner copies keys and values in; bulk copies are the copy engine's (TMA).
    copy=re.compile(
        r"\bcp\.async\.(?:c[ag]\.shared(?:::\w+)?\.global\b.*,\s*(?:0x10|16)\s*[,;]|bulk\.(?!commit|wait))"
    ),
    load=re.compile(r"\bld\.global"),
    scalar=re.compile(r"\bfma\.rn(?:\.ftz)?\.f32"),
    wait=re.compile(r"\bcp\.async\.wait_group\s+(\w+)"),
    begin=re.compile(r"\bmbarrier\.arrive\.expect_tx\S*\s+_,\s*\[\s*(%\w+)"),
    arrive=re.compile(r"\bmbarrier\.try_wait\S*\s+\w+,\s*\[\s*(%\w+)"),
    barrier=re.compile(r"\bbar(?:rier)?\.(?:cta\.)?sync\b"),
    share=re.compile(r"\b(?:st\.shared|stmatrix)"),
    instruction=re.compile(r"^\s*(?:@!?%\w+\s+)?[a-z][\w.:]+(?:\s|;)"),
)
AMD = Dialect(
    label=re.compile(r"^(\.LBB\w+):"),
    jump=re.compile(r"^\s*s_(c)?branch\w*\s+(\.LBB\w+)"),
    end=re.compile(r"^\s*(?:s_endpgm|s_setpc_b64)"),
    tensor=re.compile(r"\bv_(mfma)_"),
    copy=re.compile(r"\b(?:buffer|global)_load_(?:lds_)?dwordx?\w*.*\blds\b|\bglobal_load_lds_"),
    load=re.compile(r"\b(?:buffer|global|flat)_load_"),
    scalar=re.compile(r"\bv_(?:pk_)?fm(?:a|ac|amk|aak)_f32"),
    wait=re.compile(r"\bs_waitcnt\b.*\bvmcnt\((\d+)\)"),
    begin=None,
    arrive=None,
    barrier=re.compile(r"\bs_barrier\b"),
    share=re.compile(r"\bds_write"),
    instruction=re.compile(r"^\s+[a-z]\w+(?:\s|$)"),
)
AMD_MEMORY = re.compile(r"\b(?:buffer|global|flat|scratch)_(?:load|store|atomic)")
WIDE = re.compile(r"\b(?:buffer|global|flat)_load_(?:lds_)?dwordx[234]")


@dataclass
class Block:
    """Straight code, and the blocks it can go on to."""

    lines: list[str] = field(default_factory=list)
    next: list[int] = field(default_factory=list)


def blocks(text: str, dialect: Dialect) -> list[Block]:
    """The kernel's basic blocks in text order; the first is the entry."""
    found = [Block()]
    names: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    open_end = True  # whether control runs on from the last block into what follows
    for line in text.splitlines():
        if match := dialect.label.match(line):
            names[match[1]] = len(found)
            if open_end:
                found[-1].next.append(len(found))
            found.append(Block())
            open_end = True
        elif match := dialect.jump.match(line):
            found[-1].lines.append(line)
            jumps.append((len(found) - 1, match[2]))
            if match[1]:
                found[-1].next.append(len(found))
            found.append(Block())
            open_end = bool(match[1])
        elif dialect.end.match(line):
            found.append(Block())
            open_end = False
        else:
            found[-1].lines.append(line)
    for source, name in jumps:
        if name in names:
            found[source].next.append(names[name])
    return found


def _dominators(found: list[Block]) -> dict[int, set[int]]:
    """For every reachable block, those that every way to it leads through, itself included."""
    reachable: list[int] = []
    seen, todo = {0}, [0]
    while todo:
        here = todo.pop()
        reachable.append(here)
        for after in found[here].next:
            if after not in seen and after < len(found):
                seen.add(after)
                todo.append(after)
    before: dict[int, list[int]] = {b: [] for b in reachable}
    for b in reachable:
        for after in found[b].next:
            if after in before:
                before[after].append(b)
    over = {b: set(reachable) for b in reachable}
    over[0] = {0}
    changed = True
    while changed:
        changed = False
        for b in reachable:
            if b == 0:
                continue
            new = set.intersection(*(over[p] for p in before[b])) | {b}
            if new != over[b]:
                over[b], changed = new, True
    return over


def _bodies(found: list[Block]) -> list[set[int]]:
    """The blocks of every loop, inner ones too, in text order."""
    over = _dominators(found)
    before: dict[int, list[int]] = {b: [] for b in over}
    for b in over:
        for after in found[b].next:
            if after in before:
                before[after].append(b)
    bodies: dict[int, set[int]] = {}
    for b in over:
        for header in found[b].next:
            if header in over[b]:
                body = bodies.setdefault(header, {header})
                todo = [b]
                while todo:
                    here = todo.pop()
                    if here not in body:
                        body.add(here)
                        todo.extend(before[here])
    return [body for _, body in sorted(bodies.items())]


def loops(text: str, dialect: Dialect) -> list[list[str]]:
    """The lines of every loop, inner ones too, in text order."""
    found = blocks(text, dialect)
    return [[line for b in sorted(body) for line in found[b].lines] for body in _bodies(found)]


@dataclass(frozen=True)
class Loop:
    """What one turn of a loop does.

    `waits`: how many copies, or on AMD loads, each wait leaves on their way. Of bulk copies, which have barriers of
    their own: how many of those on their way when a turn begins are still so after its waits. `ahead`: on AMD, how
    many of the `wide` loads are still in flight while tensor cores work.
    """

    tensor: int
    tensor_kind: str | None
    scalar: int
    copies: int
    loads: int
    wide: int
    ahead: int
    waits: tuple[int, ...]
    barriers: int
    shared_stores: int
    instructions: int


def _count(pattern: re.Pattern[str], lines: Iterable[str]) -> int:
    return sum(1 for line in lines if pattern.search(line))


def loads_ahead(body: list[str]) -> int:
    """Of an AMD loop: how many wide loads of device memory have a tensor-core product between issue and arrival.

    `s_waitcnt vmcnt(n)` waits until all but the last n memory operations are done, in the order of issue. A load may be
    awaited in the next turn, so the loop is walked twice and the first turn's loads are counted.
    """
    flying: list[tuple[bool, bool]] = []  # (is a wide load of the first turn, a product came since)
    overlapped = 0
    for turn in (0, 1):
        for line in body:
            if AMD_MEMORY.search(line):
                flying.append((turn == 0 and bool(WIDE.search(line)), False))
            elif AMD.tensor.search(line):
                flying = [(counts, True) for counts, _ in flying]
            elif wait := AMD.wait.search(line):
                left = int(wait[1])
                done, flying = (flying[:-left], flying[-left:]) if left else (flying, [])
                overlapped += sum(counts and product for counts, product in done)
    return overlapped


def bulk_ahead(before: Sequence[str], dialect: Dialect) -> int:
    """How many bulk copies straight code begins and does not wait for. A product's barrier (tcgen05) is none of theirs:
    no copies were announced on it."""
    assert dialect.begin is not None
    assert dialect.arrive is not None
    begun = [match[1] for line in before if (match := dialect.begin.search(line))]
    waited = [match[1] for line in before if (match := dialect.arrive.search(line))]
    return len(begun) - sum(barrier in begun for barrier in waited)


def read_loop(body: list[str], dialect: Dialect, before: Sequence[str] = ()) -> Loop:
    """`before`: the lines that every way to the loop leads through."""
    waits = [int(match[1], 0) for line in body if (match := dialect.wait.search(line))]
    if dialect.begin is not None and (begun := _count(dialect.begin, body)):
        waits.append(max(0, bulk_ahead(before, dialect) - begun))
    kinds = [next(kind for kind in match.groups() if kind) for line in body if (match := dialect.tensor.search(line))]
    return Loop(
        tensor=len(kinds),
        tensor_kind=kinds[0] if kinds else None,
        scalar=_count(dialect.scalar, body),
        copies=_count(dialect.copy, body),
        loads=_count(dialect.load, body),
        wide=_count(WIDE, body),
        ahead=loads_ahead(body) if dialect is AMD else 0,
        waits=tuple(waits),
        barriers=_count(dialect.barrier, body),
        shared_stores=_count(dialect.share, body),
        instructions=_count(dialect.instruction, body),
    )


# A buffer that copies go through: [depth, rows, columns] of a float type.
_BUFFER = re.compile(r"ttg\.local_alloc\s*:\s*\(\)\s*->\s*!ttg\.memdesc<(\d+)x\d+x\d+x(?:bf16|f16|f32)\b")
_LAYOUT = re.compile(r"^#\w+ = #ttg\.(?:nvidia_mma|amd_mfma)<\{.*?warpsPerCTA = \[([\d, ]+)\]", re.MULTILINE)


def buffers(ttgir: str) -> int:
    """How many turns of a loop the shallowest of its buffers holds; 0 if copies go through none."""
    return min((int(depth) for depth in _BUFFER.findall(ttgir)), default=0)


def warps(ttgir: str) -> str | None:
    """How the products lay out their warps, rows by columns: with one column, a row stays inside a warp. None where
    products are not laid out over warps (tcgen05)."""
    return ", ".join(sorted({layout.replace(", ", " x ") for layout in _LAYOUT.findall(ttgir)})) or None


# A tensor-core instruction does the work of at least this many multiply-adds of a warp (mma.m16n8k16: 2048 / 32).
TENSOR_WORTH = 64


def main_loop(text: str, dialect: Dialect) -> Loop | None:
    """The first loop that multiplies at least half as much as the one that multiplies most; None if there is no loop.

    The first, because kernels begin with the blocks that need no mask and end with the few that do, and a mask can cost
    products too; and of loops inside each other the inner one. In a kernel without products, loads count.
    """
    code = blocks(text, dialect)
    over = _dominators(code)
    bodies = _bodies(code)
    looping = set().union(*bodies)

    def lines(some: Iterable[int]) -> list[str]:
        return [line for b in sorted(some) for line in code[b].lines]

    ways = (set.intersection(*(over[b] for b in body)) - looping for body in bodies)
    found = [read_loop(lines(body), dialect, lines(way)) for body, way in zip(bodies, ways, strict=True)]
    work = [TENSOR_WORTH * loop.tensor + loop.scalar for loop in found]
    if not any(work):
        work = [loop.copies + loop.loads for loop in found]
    hot = [i for i, done in enumerate(work) if 2 * done >= max(work)]
    inner = (i for i in hot if not any(bodies[j] < bodies[i] for j in hot))
    return next((found[i] for i in inner), None)
