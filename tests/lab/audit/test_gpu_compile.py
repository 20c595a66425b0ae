"""Compiling without a GPU: the reading of binaries on code we know, and the aims of every variant that ships."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from closecall.backends.triton.variants import variants
from closecall_lab.audit import assembly, devices
from closecall_lab.audit.assembly import AMD, PTX
from closecall_lab.audit.compile import CompileError, Compiler
from closecall_lab.audit.facts import Facts

ARCHS = tuple(devices.TARGETS)
NVIDIA = tuple(arch for arch in ARCHS if arch.startswith("sm_"))
SHIPPED = [(arch, variant.name) for arch in ARCHS for variant in variants(arch)]
# What every run compiles: each hot loop once for each generation that compiles it differently; the tests of numbers
# below want most of these anyway. `make audit` compiles the hot kernels of all dims and targets, and the others for one
# of each maker; `closecall gpu-report` all there are.
HOT = (
    "attend D", "attend dense", "attend packed", "attend paged", "attend tma", "few D", "few paged", "scores mean D",
    "scores mean pooled D", "scores quest D", "scores quest pooled D", "again mean D", "again quest D", "select",
)  # fmt: skip
USUAL = {
    "attend D128 bf16": ("sm_80", "sm_90", "sm_100", "gfx942"),
    "attend dense D128 bf16": ("sm_90",),
    "attend packed D128 bf16": ("sm_80", "sm_90"),
    "attend paged D128 bf16": ("sm_80", "sm_90"),
    "attend tma D128 bf16": ("sm_90",),
    "scores mean D128 bf16": ("sm_80", "sm_90"),
    "scores quest D128 bf16": ("sm_80", "sm_90", "gfx942"),
    "scores quest pooled D128 bf16": ("sm_80", "sm_90"),
    "again mean D128 bf16": ("sm_80", "sm_90"),
    "select keep": ("sm_90",),
}


def _compiled() -> list[Any]:
    listed = []
    for arch, name in SHIPPED:
        hot = name.startswith(HOT) and "fp16" not in name
        if hot or (arch in ("sm_80", "gfx942") and name.endswith("bf16")):
            often = arch in USUAL.get(name, ())
            listed.append(pytest.param(arch, name, marks=() if often else pytest.mark.audit))
    return listed


# A small attention loop over counted blocks in three forms: with the sentinel test inside that the paper's kernel had;
# our own until the report learned to look at waits, with each block looked up in its own turn; and with the next block
# carried one turn ahead.
SMALL = """
from dataclasses import dataclass
import triton
import triton.language as tl

@triton.jit
def attend(q, k, v, kept, counts, out, width, sentinel, D: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
           TEST: tl.constexpr, CARRY: tl.constexpr):
    t = tl.program_id(0)
    r = tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    tile = tl.load(q + (t * BLOCK + r)[:, None] * D + d[None, :])
    acc = tl.zeros([BLOCK, D], tl.float32)
    top = tl.full([BLOCK], -1e30, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    n = width if TEST else tl.load(counts + t)
    coming = tl.load(kept + t * width)
    for i in range(0, n):
        if CARRY:
            b = coming
            coming = tl.load(kept + t * width + tl.minimum(i + 1, n - 1))
        else:
            b = tl.load(kept + t * width + i)
        if not TEST or b < sentinel:
            rows = (b * BLOCK + tl.arange(0, KEYS))
            s = tl.dot(tile, tl.trans(tl.load(k + rows[:, None] * D + d[None, :])))
            higher = tl.maximum(top, tl.max(s, 1))
            w = tl.exp2(s - higher[:, None])
            shrink = tl.exp2(top - higher)
            mass = mass * shrink + tl.sum(w, 1)
            values = tl.load(v + rows[:, None] * D + d[None, :])
            acc = tl.dot(w.to(values.dtype), values, acc * shrink[:, None])
            top = higher
    tl.store(out + (t * BLOCK + r)[:, None] * D + d[None, :], (acc / mass[:, None]).to(out.dtype.element_ty))

@triton.jit
def double(x, y, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + at, tl.load(x + at) * 2)

@triton.jit
def wrong(x, y, N: tl.constexpr):
    tl.store(y + tl.arange(0, N), tl.load(x + no_such_name))

@dataclass(frozen=True)
class Variant:
    name: str
    kernel: object
    signature: dict
    constexprs: dict
    arch: str
    num_warps: int = 4
    num_stages: int = 3
    pipelined: bool = True
    head_dim: int = 128
    dtype: str = "bf16"

    @property
    def attrs(self):
        return {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(self.signature.values()) if kind[0] == "*"}

def variants(arch):
    x = "*bf16"
    types = {"q": x, "k": x, "v": x, "kept": "*i32", "counts": "*i32", "out": x, "width": "i32", "sentinel": "i32"}
    def attention(name, D=128, KEYS=64, TEST=False, CARRY=True, **more):
        fixed = {"D": D, "BLOCK": 64, "KEYS": KEYS, "TEST": TEST, "CARRY": CARRY}
        return Variant(name, attend, types, fixed, arch, **more)
    flat = {"x": "*fp32", "y": "*fp32"}
    return [
        attention("carried"),
        attention("looked up", CARRY=False),
        attention("narrow", D=64),
        attention("halves", KEYS=32),
        attention("tested", TEST=True, CARRY=False),
        attention("crammed", D=256, num_warps=1, num_stages=2),
        attention("heaped", D=256, num_stages=9, num_warps=8),
        Variant("double", double, flat, {"N": 1024}, arch, pipelined=False),
        Variant("wrong", wrong, flat, {"N": 1024}, arch, pipelined=False),
        Variant("untyped", double, {"x": "*fp32"}, {"N": 1024}, arch, pipelined=False),
    ]
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("small")


@pytest.fixture(scope="module")
def small(directory: Path) -> Iterator[Compiler]:
    (directory / "small_variants.py").write_text(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        patch.setenv("TRITON_CACHE_DIR", str(directory / "triton"))
        patch.setenv("TRITON_INTERPRET", "1")  # compiling must not care
        with Compiler("small_variants", directory / "facts") as compiler:
            yield compiler


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    with Compiler() as found:
        yield found


@pytest.mark.parametrize("arch", ARCHS)
def test_constants_are_those_that_the_kernel_takes(arch: str) -> None:
    """Needs no compiler. Variants once shared a dict that the next one changed."""
    for variant in variants(arch):
        assert set(variant.constexprs) <= set(variant.kernel.arg_names), variant.name


# The aims.


@pytest.mark.parametrize(("arch", "name"), _compiled())
def test_every_variant_meets_its_aims(arch: str, name: str, compiler: Compiler) -> None:
    facts = compiler.facts(arch, name)
    assert facts.problems() == []
    assert (facts.stack, facts.spills) == (0, 0)
    limits = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
    assert facts.shared <= limits[arch] * 1024
    if name.startswith("attend"):
        assert facts.overlapped
        if arch in NVIDIA:
            assert min(facts.waits) > 0
            assert facts.buffers >= 2
        if arch in NVIDIA and facts.dtype == "bf16" and facts.warps is not None:
            assert facts.row_in_warp
    if (arch, name) == ("sm_90", "attend D128 bf16"):
        assert facts.registers <= 224


@pytest.mark.parametrize(("arch", "waits", "buffers"), [("sm_80", 3, 2), ("sm_90", 2, 3), ("sm_100", 2, 3)])
def test_the_attention_loop_in_numbers(arch: str, waits: int, buffers: int, compiler: Compiler) -> None:
    facts = compiler.facts(arch, "attend D128 bf16")
    assert (facts.waits, facts.buffers, facts.shared_stores, facts.resident_blocks) == ((waits,), buffers, 0, 2)
    if arch != "sm_100":
        assert (facts.warps, facts.barriers) == ("4 x 1", 2)


@pytest.mark.parametrize(("arch", "waits", "buffers"), [("sm_80", 3, 2), ("sm_90", 2, 3)])
def test_packed_heads_meet_each_key_once(arch: str, waits: int, buffers: int, compiler: Compiler) -> None:
    """Rows of two heads a turn, for as many copies of keys and values as the rows of one take, over the same keys."""
    alone, packed = (compiler.facts(arch, f"attend{kind} D128 bf16") for kind in ("", " packed"))
    assert (alone.rows, packed.rows, alone.keys, packed.keys) == (64, 128, 64, 64)
    assert (packed.waits, packed.buffers, packed.shared_stores) == ((waits,), buffers, 0)
    # Copies are counted for a thread, and there are twice as many of these.
    assert packed.copies * packed.num_warps == alone.copies * alone.num_warps


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_pages_cost_the_attention_loop_little(arch: str, compiler: Compiler) -> None:
    """Looking up a page a turn ahead: no wait, no buffer, no thread block less, and a handful of instructions."""
    facts, plain = (compiler.facts(arch, f"attend {kind}D128 bf16") for kind in ("paged ", ""))
    for field in ("waits", "buffers", "barriers", "shared", "shared_stores", "resident_blocks", "tensor_per_block"):
        assert getattr(facts, field) == getattr(plain, field), field
    assert facts.instructions <= plain.instructions + 8


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_the_copy_engine_saves_instructions_and_registers(arch: str, compiler: Compiler) -> None:
    """Two copies a turn, one of keys and one of values, as far ahead as before, for one more barrier."""
    facts, plain = (compiler.facts(arch, f"attend {kind}D128 bf16") for kind in ("tma ", ""))
    for field in ("waits", "buffers", "shared_stores", "resident_blocks", "tensor_per_block", "stack"):
        assert getattr(facts, field) == getattr(plain, field), field
    assert (facts.copies, facts.barriers) == (2, plain.barriers + 1)
    assert facts.instructions <= plain.instructions - 40
    assert facts.registers <= plain.registers - 10


@pytest.mark.parametrize("scorer", ["quest", "quest softmax", "mean", "outliers-1"])
@pytest.mark.parametrize(("arch", "most"), [("sm_80", 500), ("sm_90", 350)])
def test_the_score_loop_in_numbers(arch: str, most: int, scorer: str, compiler: Compiler) -> None:
    """64 rows by 64 blocks a turn, with masks and packing."""
    facts = compiler.facts(arch, f"scores {scorer} D128 bf16")
    assert (facts.overlapped, facts.row_in_warp, facts.barriers) == (True, True, 2)
    assert (facts.rows, facts.keys) == (64, 64)
    assert facts.instructions <= most


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_sums_loop_keeps_rows_and_overlaps(arch: str, compiler: Compiler) -> None:
    """What `auto` normalises by: 64 rows by 64 blocks a turn, a row's sum inside a warp."""
    facts = compiler.facts(arch, "sums boxed-outliers-1 softmax D128 bf16")
    assert (facts.overlapped, facts.row_in_warp, facts.barriers) == (True, True, 2)
    assert (facts.rows, facts.keys) == (64, 64)


@pytest.mark.parametrize(("arch", "most"), [("sm_80", 500), ("sm_90", 350)])
def test_a_turn_of_pooled_scores_serves_eight_tiles(arch: str, most: int, compiler: Compiler) -> None:
    """Its 64 rows are 8 means of each of 8 tiles, and its loop is about as long as that of one tile's 64 rows."""
    (constants,) = [v.constexprs for v in variants(arch) if v.name == "scores quest pooled D128 bf16"]
    assert (constants["TILES"], constants["RUNS"]) == (8, 8)
    facts = compiler.facts(arch, "scores quest pooled D128 bf16")
    assert (facts.overlapped, facts.row_in_warp, facts.barriers) == (True, True, 2)
    assert (facts.rows, facts.keys) == (64, 64)
    assert facts.instructions <= most


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_candidates_cost_the_score_loop_little(arch: str, compiler: Compiler) -> None:
    """Gathered by indices that are looked up one turn ahead: no wait, no buffer, no thread block less."""
    facts, plain = (compiler.facts(arch, f"{kind} mean D128 bf16") for kind in ("again", "scores"))
    same = ("waits", "buffers", "barriers", "shared", "shared_stores", "resident_blocks", "tensor", "copies", "keys")
    for field in same:
        assert getattr(facts, field) == getattr(plain, field), field
    assert facts.overlapped
    assert facts.instructions <= plain.instructions + 32


def test_the_variants_cover_what_is_promised() -> None:
    names = [name for arch, name in SHIPPED if arch == "sm_90"]
    assert len(set(names)) == len(names)
    for dim in ("D64", "D96", "D128", "D192", "D256", "D192/128"):
        for dtype in ("fp16", "bf16", "fp32"):
            if dtype == "fp16" and dim != "D128":
                continue
            assert f"attend {dim} {dtype}" in names
            assert (f"attend packed {dim} {dtype}" in names) == (dtype != "fp32")
            if dim in ("D64", "D128"):
                assert f"summaries box {dim} {dtype}" in names
                for scorer in ("mean", "quest", "outliers-1", "outliers-3", "boxed-outliers-1"):
                    kinds = (f"summaries {scorer}", f"scores {scorer}", f"scores {scorer} mass", f"sums {scorer}")
                    kinds += (f"scores {scorer} pooled", f"scores {scorer} pooled mass", f"sums {scorer} pooled")
                    kinds += (f"again {scorer}", f"again {scorer} mass", f"sums {scorer} again")
                    assert {f"{kind} {dim} {dtype}" for kind in kinds} <= set(names)
                assert {f"attend forced {dim}/16 {dtype}", f"few forced {dim}/16 {dtype}"} <= set(names)
    boxed = [name for name in names if name.startswith("attend tma")]
    assert {"attend tma D128 bf16", "attend tma dense D256 bf16", "attend tma packed D128 bf16"} <= set(boxed)
    for arch in ARCHS:  # the copy engine is there on two of them
        there = names if arch in ("sm_90", "sm_100") else [name for name in names if name not in boxed]
        assert [name for a, name in SHIPPED if a == arch] == there


# What is read from a binary, on kernels we know.


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_a_carried_index_lets_copies_overlap(arch: str, small: Compiler) -> None:
    facts = small.facts(arch, "narrow" if arch == "sm_80" else "carried")
    kind = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}[arch]
    assert (facts.overlapped, facts.tensor_kind, facts.stack, facts.spills) == (True, kind, 0, 0)
    assert facts.problems() == []
    assert 0 < facts.registers <= devices.target(arch).max_registers
    assert facts.resident_warps == 4 * facts.resident_blocks > 0
    assert facts.scalar_registers is facts.scalar_spills is None
    # 64 x 64 x 64 twice over 16 x 8 x 16 mma of four warps, 64 x N x 16 wgmma of 128 columns: known by hand.
    expected = {"sm_80": 64, "sm_90": 8 + 4}.get(arch)
    assert expected is None or facts.tensor_per_block == expected


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_old_loop_is_seen_to_wait(arch: str, small: Compiler) -> None:
    """It has copies in it, which is what once passed for a pipeline."""
    facts = small.facts(arch, "looked up")
    assert facts.copies > 0
    assert (facts.overlapped, facts.waits) == (False, (0,))
    assert any(problem.startswith("copies wait in the main loop") for problem in facts.problems())


def test_a_softmax_across_warps_is_seen(small: Compiler) -> None:
    """64 rows, and 128 values in one product: Triton lays it out with warps side by side."""
    wide, narrow = small.facts("sm_80", "carried"), small.facts("sm_80", "narrow")
    assert (wide.row_in_warp, narrow.row_in_warp) == (False, True)
    assert wide.problems() == [f"the softmax crosses warps ({wide.warps})"]
    assert wide.shared_stores > 0 == narrow.shared_stores
    assert wide.barriers > 2 == narrow.barriers


def test_half_blocks_count_for_a_whole_one(small: Compiler) -> None:
    whole, half = (small.facts("sm_80", name) for name in ("carried", "halves"))
    assert half.tensor == whole.tensor // 2
    assert half.tensor_per_block == whole.tensor_per_block


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_a_sentinel_test_in_the_loop_is_seen_to_stop_pipelining(arch: str, small: Compiler) -> None:
    facts = small.facts(arch, "tested")
    assert (facts.overlapped, facts.copies) == (False, 0)
    assert "copies wait in the main loop (no copies)" in facts.problems()


@pytest.mark.parametrize("arch", ["sm_80", "gfx942"])
def test_spills_are_seen(arch: str, small: Compiler) -> None:
    facts = small.facts(arch, "crammed")
    assert facts.stack > 0
    assert any("stack" in problem for problem in facts.problems())


def test_too_much_shared_memory_is_seen(small: Compiler) -> None:
    facts = small.facts("sm_80", "heaped")
    assert facts.shared > 163 * 1024
    assert facts.resident_warps == 0
    assert f"{facts.shared} bytes of shared memory, 166912 is the limit" in facts.problems()


@pytest.mark.parametrize("arch", ARCHS)
def test_a_kernel_without_a_loop(arch: str, small: Compiler) -> None:
    facts = small.facts(arch, "double")
    assert (facts.loop, facts.overlapped, facts.tensor, facts.tensor_per_block, facts.shared) == (
        False,
        None,
        0,
        None,
        0,
    )
    assert facts.problems() == []


def test_facts_survive_json(small: Compiler) -> None:
    facts = small.facts("sm_80", "carried")
    assert Facts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts


# What goes wrong.


def test_what_does_not_compile_is_named_and_does_no_harm(small: Compiler) -> None:
    with pytest.raises(CompileError, match=r"(?s)wrong for sm_80: .*no_such_name"):
        small.facts("sm_80", "wrong")
    with pytest.raises(CompileError, match="untyped: no type and no value for y"):
        small.facts("sm_80", "untyped")
    assert small.facts("sm_80", "double").registers > 0


def test_unknown_names_are_told_the_near_match(small: Compiler) -> None:
    with pytest.raises(CompileError, match="did you mean 'carried'"):
        small.facts("sm_80", "carry")
    with pytest.raises(ValueError, match="unknown architecture 'sm_8': did you mean 'sm_89'"):
        small.facts("sm_8", "carried")


def test_a_compiler_that_dies_is_reported_and_replaced(directory: Path, small: Compiler) -> None:
    text = (
        "import os, sys\ndef variants(arch):\n    print('last words', file=sys.stderr, flush=True)\n    os._exit(3)\n"
    )
    (directory / "dying_variants.py").write_text(text)
    with Compiler("dying_variants", directory / "facts") as dying:
        for _ in range(2):
            with pytest.raises(CompileError, match="sm_80: the compiler ended with exit code 3, saying: last words"):
                dying.names("sm_80")
        dying.variants = "small_variants"
        assert "carried" in dying.names("sm_80")


def test_what_was_compiled_is_remembered_until_its_source_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "changing_variants.py"
    module.write_text(SMALL)

    def registers() -> int:
        with Compiler("changing_variants", tmp_path / "facts") as compiler:
            return compiler.facts("sm_80", "double").registers

    first = registers()
    (remembered,) = (tmp_path / "facts").glob("*.json")
    remembered.write_text(json.dumps(json.loads(remembered.read_text()) | {"registers": 1}))
    assert registers() == 1 != first
    remembered.write_text("{")  # as a run that was cut off might leave it
    assert registers() == first
    module.write_text(SMALL.replace("* 2)", "* 3)"))
    assert registers() == first
    assert len(list((tmp_path / "facts").glob("*.json"))) == 2


def test_a_directory_that_cannot_be_written_costs_only_time(tmp_path: Path, small: Compiler) -> None:
    (tmp_path / "file").write_text("")
    with Compiler("small_variants", tmp_path / "file") as compiler:
        assert compiler.facts("sm_80", "double") == small.facts("sm_80", "double")


# Assembly by hand.

LOOP = """
$L__BB0_0:
	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r3;
	@%p1 bra 	$L__BB0_4;
	bra.uni 	$L__BB0_2;
$L__BB0_1:                              // the end of the loop, put before its beginning
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %f1 }, { %r1 }, { %r2 }, { %f1 };
	@%p2 bra 	$L__BB0_3;
$L__BB0_2:
	cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x4, %r3;
	cp.async.commit_group;
	bra.uni 	$L__BB0_1;
$L__BB0_3:
	@%p3 bra 	$L__BB0_2;
$L__BB0_4:
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %f1 }, { %r1 }, { %r2 }, { %f1 };
	ret;
"""


def test_only_what_is_inside_the_loop_counts() -> None:
    (body,) = assembly.loops(LOOP, PTX)
    loop = assembly.read_loop(body, PTX)
    assert (loop.tensor, loop.tensor_kind, loop.copies) == (1, "mma", 0)  # a block index of 4 bytes is no pipeline
    wide = LOOP.replace("0x4", "0x10")
    assert assembly.read_loop(assembly.loops(wide, PTX)[0], PTX).copies == 1


@pytest.mark.parametrize(
    ("line", "copies"),
    [
        ("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r3];", 1),
        ("cp.async.bulk.commit_group;", 0),
        ("cp.async.wait_group 0;", 0),
        ("@%p1 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, 0x10;", 1),
        ("ld.global.v4.b32 { %r1 }, [ %rd1 ];", 0),
    ],
)
def test_what_an_asynchronous_copy_is(line: str, copies: int) -> None:
    assert assembly.read_loop([line], PTX).copies == copies


BEGIN = "\t@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r{}], 16384;"
ARRIVE = "\tmbarrier.try_wait.parity.shared::cta.b64 complete, [%r{}], %r9;"
BULK = "\tcp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r3];"


@pytest.mark.parametrize(
    ("begun", "awaited", "waits"),
    [
        ((1, 2, 3, 4), (), 2),  # two turns of keys and values: after the waits of one, the other is on its way
        ((1, 2), (), 0),  # nothing but what this turn waits for
        ((1, 2, 3, 4, 5, 6, 1), (1, 2, 3, 70), 2),  # a turn done beforehand; 70 is a product's own barrier
    ],
)
def test_bulk_copies_have_barriers_of_their_own(begun: tuple[int, ...], awaited: tuple[int, ...], waits: int) -> None:
    before = [BEGIN.format(r) for r in begun] + [ARRIVE.format(r) for r in awaited]
    turn = [ARRIVE.format(11), ARRIVE.format(12), "\tmma.sync.x", BEGIN.format(13), BULK, BEGIN.format(14), BULK]
    found = assembly.main_loop("\n".join([*before, _loop(1, *turn)]), PTX)
    assert found is not None
    assert (found.copies, found.waits) == (2, (waits,))


def test_nested_loops_and_none() -> None:
    text = "\n".join(
        [
            "$L__BB0_1:",
            "$L__BB0_2:",
            "\tfma.rn.f32 %f1, %f2, %f3, %f1;",
            "\t@%p1 bra $L__BB0_2;",
            "\t@%p2 bra $L__BB0_1;",
        ]
    )
    outer, inner = (assembly.read_loop(body, PTX) for body in assembly.loops(text, PTX))
    assert (outer.scalar, inner.scalar) == (1, 1)
    assert assembly.main_loop("\tret;\n$L__BB0_1:\n\tbra.uni $L__BB0_1;", PTX) is None  # nothing leads into that loop


def test_of_nested_loops_the_inner_one_counts() -> None:
    inner = ["$L__BB0_2:", "\tmma.sync.x", "\t@%p1 bra $L__BB0_2;"]
    text = "\n".join(["$L__BB0_1:", "\tbar.sync 0;", *inner, "\t@%p2 bra $L__BB0_1;"])
    found = assembly.main_loop(text, PTX)
    assert found is not None
    assert (found.tensor, found.barriers) == (1, 0)


def _loop(number: int, *lines: str) -> str:
    return "\n".join([f"$L__BB0_{number}:", *lines, f"\t@%p1 bra $L__BB0_{number};"])


def test_the_main_loop_is_the_first_that_multiplies_enough() -> None:
    product, scalar, copy = "\tmma.sync.x", "\tfma.rn.f32 x;", "\tcp.async.cg.shared.global [x], [y], 16, 16;"
    setup, main, tail = _loop(1, scalar), _loop(2, product, product, copy), _loop(3, product, product, product)
    found = assembly.main_loop("\n".join([setup, main, tail]), PTX)
    assert found is not None
    assert (found.tensor, found.copies) == (2, 1)
    # Float32 products of single numbers outweigh a mask's tensor-core product.
    ieee, masked = _loop(1, *[scalar] * 1000, copy), _loop(2, *[scalar] * 1000, product)
    found = assembly.main_loop("\n".join([ieee, masked]), PTX)
    assert found is not None
    assert found.copies == 1


LOAD, PRODUCT = (
    "\tglobal_load_dwordx4 v[0:3], v[4:5], off",
    "\tv_mfma_f32_32x32x8_bf16 v[0:15], v[1:2], v[3:4], v[0:15]",
)


@pytest.mark.parametrize(
    ("body", "ahead"),
    [
        ([LOAD, "\ts_waitcnt vmcnt(0)", PRODUCT], 0),
        ([LOAD, PRODUCT, "\ts_waitcnt vmcnt(0)"], 1),
        (["\ts_waitcnt vmcnt(0)", PRODUCT, LOAD, LOAD], 0),  # awaited at once in the next turn
        (["\ts_waitcnt vmcnt(0)", LOAD, LOAD, PRODUCT], 2),  # awaited in the next turn, after a product
        ([LOAD, LOAD, "\ts_waitcnt vmcnt(1)", PRODUCT, "\ts_waitcnt vmcnt(0)"], 1),
        (["\tglobal_load_dword v1, v2, off", PRODUCT, "\ts_waitcnt vmcnt(0)"], 0),  # a block index
        ([LOAD, "\tglobal_store_dwordx4 v[0:1], v[2:5], off", "\ts_waitcnt vmcnt(1)", PRODUCT], 0),
    ],
)
def test_amd_loads_in_flight(body: list[str], ahead: int) -> None:
    assert assembly.read_loop(body, AMD).ahead == ahead


# What fits on a multiprocessor, by hand.


@pytest.mark.parametrize(
    ("arch", "warps", "registers", "shared", "blocks", "limit"),
    [
        ("sm_80", 4, 208, 0, 2, "registers"),  # 16384 // 6656 = 2 warps on each of 4 schedulers
        ("sm_80", 4, 128, 0, 4, "registers"),
        ("sm_80", 4, 129, 0, 3, "registers"),  # rounded up to 136: 16384 // 4352 = 3
        ("sm_80", 4, 32, 0, 16, "warps"),
        ("sm_80", 1, 16, 0, 32, "blocks"),
        ("sm_80", 4, 32, 81 * 1024, 2, "shared memory"),  # 2 x (81 + 1) = 164
        ("sm_80", 4, 32, 81 * 1024 + 1, 1, "shared memory"),
        ("sm_80", 4, 32, 163 * 1024 + 1, 0, "shared memory"),
        ("sm_90", 4, 32, 113 * 1024, 2, "shared memory"),
        ("gfx942", 4, 264, 0, 1, "registers"),  # 512 // 264 wavefronts on each of 4 SIMDs
        ("gfx942", 4, 128, 0, 4, "registers"),
        ("gfx942", 4, 32, 40 * 1024, 1, "shared memory"),
    ],
)
def test_residency(arch: str, warps: int, registers: int, shared: int, blocks: int, limit: str) -> None:
    found = devices.target(arch).resident(warps=warps, registers=registers, shared=shared)
    assert (found.blocks, found.warps, found.limit) == (blocks, blocks * warps, limit)


def test_residency_of_what_only_one_maker_has() -> None:
    assert devices.target("sm_100").resident(warps=4, registers=32, shared=0, tensor_columns=256).blocks == 2
    assert devices.target("gfx942").resident(warps=4, registers=32, shared=0, scalar_registers=102).warps == 28


@pytest.mark.parametrize("given", [{"warps": 0}, {"registers": -1}, {"shared": -1}])
def test_residency_of_nonsense(given: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        devices.target("sm_80").resident(**({"warps": 4, "registers": 32, "shared": 0} | given))
