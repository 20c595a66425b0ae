"""The compile report and its command, on made-up facts: what compilers really say is tested in test_gpu_compile.py."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from closecall.cli import Parser
from closecall_lab.audit import cli, page, report
from closecall_lab.audit.compile import CompileError, Compiler
from closecall_lab.audit.facts import Facts

FINE: dict[str, Any] = {
    "head_dim": 128,
    "dtype": "bf16",
    "num_warps": 4,
    "num_stages": 3,
    "must_pipeline": True,
    "rows": 64,
    "keys": 32,
    "block": 64,
    "registers": 200,
    "scalar_registers": None,
    "stack": 0,
    "spills": 0,
    "scalar_spills": None,
    "shared": 81_920,
    "tensor_columns": 0,
    "loop": True,
    "tensor": 6,
    "tensor_kind": "wgmma",
    "copies": 16,
    "loads": 0,
    "wide_loads": 0,
    "loads_ahead": 0,
    "waits": (2,),
    "buffers": 3,
    "barriers": 2,
    "shared_stores": 0,
    "instructions": 400,
    "warps": "4 x 1",
    "resident_blocks": 2,
    "resident_warps": 8,
    "limit": "registers",
}
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
NAMES = ["attend D64 bf16", "attend D128 bf16", "summaries D64 bf16", "broken D64"]


class Made(Compiler):
    """Answers at once, and notes who asked."""

    threads: set[int]
    closed: int

    def __init__(self) -> None:
        pass

    def names(self, arch: str) -> list[str]:
        return [name for name in NAMES if self.with_broken or not name.startswith("broken")]

    def facts(self, arch: str, name: str) -> Facts:
        type(self).threads.add(threading.get_ident())
        if name.startswith("broken"):
            raise CompileError(f"{name} for {arch}: it is broken")
        more: dict[str, Any] = {}
        if arch == "gfx942":
            more = {
                "copies": 0,
                "loads": 9,
                "wide_loads": 8,
                "loads_ahead": 8,
                "scalar_registers": 90,
                "scalar_spills": 21,
                "shared": 32_768,
            }
        if name.startswith("summaries"):
            more |= {"must_pipeline": False, "loop": False, "tensor": 0, "tensor_kind": None, "copies": 0, "loads": 0}
        return Facts(name=name, arch=arch, **(FINE | more))

    def close(self) -> None:
        type(self).closed += 1

    with_broken = False


class Broken(Made):
    with_broken = True


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> type[Made]:
    for each in (Made, Broken):
        monkeypatch.setattr(each, "threads", set(), raising=False)
        monkeypatch.setattr(each, "closed", 0, raising=False)
    monkeypatch.setattr(report, "Compiler", Made)
    return Made


def run(*argv: str) -> None:
    parser = Parser(prog="closecall")
    cli.add_gpu_report(parser.add_subparsers())
    args = parser.parse_args(["gpu-report", *argv])
    args.run(args)


def test_everything_in_order_whoever_compiles_it() -> None:
    calls: list[tuple[int, int]] = []
    found = report.gather(jobs=3, progress=lambda done, total, job: calls.append((done, total)))
    assert [(f.arch, f.name) for f in found.facts] == [(arch, name) for arch in TARGETS for name in NAMES[:3]]
    total = 3 * len(TARGETS)
    assert calls == [(i + 1, total) for i in range(total)]
    assert Made.closed == 3
    assert found.problems() == []


def test_a_failure_is_told_and_the_rest_goes_on() -> None:
    found = report.gather(("sm_90",), compiler=Broken, jobs=2)
    assert [f.name for f in found.facts] == NAMES[:3]
    assert found.problems() == ["broken D64 for sm_90: it is broken"]
    assert "does not compile: broken D64 for sm_90: it is broken" in report.text(found)
    assert "1 of 4 break an aim" in page.markdown(found, "x.md")
    assert found.to_dict()["failures"] == [
        {"arch": "sm_90", "name": "broken D64", "error": "broken D64 for sm_90: it is broken"}
    ]
    alone = report.gather(("sm_90",), kernel="broken", compiler=Broken)
    assert report.text(alone).startswith("No variant compiled.")
    assert "broken D64" in page.markdown(alone, "x.md")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"stack": 8}, "8 bytes of stack"),
        ({"spills": 2}, "2 spills"),
        ({"shared": 300_000}, "300000 bytes of shared memory, 232448 is the limit"),
        ({"resident_blocks": 0, "limit": "registers"}, "not one thread block fits (registers)"),
        ({"copies": 0}, "copies wait in the main loop (no copies)"),
        ({"waits": (2, 0)}, "copies wait in the main loop (16 copies, wait 2/0, buffers 3)"),
        ({"waits": ()}, "copies wait in the main loop (16 copies, wait none, buffers 3)"),
        ({"buffers": 1}, "copies wait in the main loop (16 copies, wait 2, buffers 1)"),
        ({"loop": False}, "copies wait in the main loop (None)"),
        ({"warps": "1 x 4, 4 x 1"}, "the softmax crosses warps (1 x 4, 4 x 1)"),
        ({"instructions": 431}, "431 instructions a turn, 430 is the aim"),
    ],
)
def test_each_aim_can_be_broken(change: dict[str, Any], problem: str) -> None:
    assert Facts(name="attend D128 bf16", arch="sm_90", **FINE).problems() == []
    facts = Facts(name="attend D128 bf16", arch="sm_90", **(FINE | change))
    assert facts.problems() == [problem]
    table = report.table(report.Report([facts], [], ""))
    assert problem in table.text()


def test_a_loop_with_an_aim_must_overlap_whatever_its_kernel_promises() -> None:
    change = {"must_pipeline": False, "waits": (0,)}
    facts = Facts(name="sums quest D128 bf16", arch="sm_90", **(FINE | change))
    assert facts.problems() == ["copies wait in the main loop (16 copies, wait 0, buffers 3)"]
    assert not Facts(name="merge D128 bf16", arch="sm_90", **(FINE | change)).problems()


@pytest.mark.parametrize(("ahead", "overlapped"), [(8, True), (5, True), (4, False), (0, False)])
def test_amd_must_have_most_loads_in_flight(ahead: int, overlapped: bool) -> None:
    change = {"copies": 0, "waits": (), "shared": 1024, "wide_loads": 8, "loads_ahead": ahead}
    facts = Facts(name="x", arch="gfx942", **(FINE | change))
    assert facts.overlapped is overlapped
    words = f"{ahead} of 8 wide loads ahead, buffers 3"
    assert facts.problems() == ([] if overlapped else [f"copies wait in the main loop ({words})"])


def test_where_products_are_not_laid_out_over_warps() -> None:
    facts = Facts(name="x", arch="sm_100", **(FINE | {"warps": None}))
    assert (facts.row_in_warp, facts.problems()) == (None, [])


def test_the_table_says_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    run("--arch", "sm_90,gfx942")
    said = capsys.readouterr()
    lines = said.out.splitlines()
    head = " ".join(column.title for column in report.COLUMNS)
    assert "6 variants" in lines[0]
    assert all(len(line) <= 120 for line in lines)
    for word in (
        "variant",
        "target",
        "warps",
        "stages",
        "registers",
        "stack",
        "spills",
        "shared KiB",
        "resident blocks",
        "overlap",
        "warps over",
        "barriers",
        "instructions",
        "tensor-core",
    ):
        assert word in head
    assert "broken aims" not in " ".join(said.out.split())  # nothing is
    row = " ".join(line for line in lines if line.startswith("attend D128 bf16    sm_90"))
    assert "16 copies, wait 2, buffers 3" in row
    assert "12 wgmma" in row  # two turns of 32 keys to a block of 64
    row = " ".join(line for line in lines if line.startswith("attend D128 bf16    gfx942"))
    assert "8 of 8 wide loads ahead, buffers 3" in row
    assert row.split()[7:10] == ["0", "0", "21"]  # stack, spills, and scalars that found a place in vector registers
    assert "6/6  summaries D64 bf16 for gfx942" in said.err


def test_files(tmp_path: Path) -> None:
    run(
        "--kernel",
        "ATTEND",
        "--jobs",
        "1",
        "--json",
        str(tmp_path / "a" / "r.json"),
        "--markdown",
        str(tmp_path / "r.md"),
    )
    data = json.loads((tmp_path / "a" / "r.json").read_text())
    assert set(data) == {"closecall_gpu_report", "closecall", "triton", "variants", "failures"}
    assert len(data["variants"]) == 2 * len(TARGETS)
    assert Facts.from_dict(data["variants"][0]).name == "attend D64 bf16"
    assert {"overlapped", "problems", "tensor_per_block"} <= set(data["variants"][0])
    text = (tmp_path / "r.md").read_text()
    assert f"`closecall gpu-report --kernel 'ATTEND' --markdown {tmp_path / 'r.md'}`" in text
    assert "All 14 variants meet the aims" in text
    assert "2 (attend on gfx942) park up to 21 scalar registers" in text
    assert text.count("| attend D128 bf16 |") == 1  # a line for all targets


def test_a_line_of_the_page() -> None:
    plain = "w2 b3 4x1 2bar 400i 200r 80K x2"
    assert page.cell(Facts(name="attend D128 bf16", arch="sm_90", **FINE)) == plain
    worse = Facts(name="attend D128 bf16", arch="sm_90", **(FINE | {"stack": 8, "waits": (2, 0)}))
    assert page.cell(worse) == "**w0 b3 4x1 2bar 400i 200r 8st 80K x2**"
    change = {"copies": 0, "wide_loads": 8, "loads_ahead": 7, "shared": 1536, "warps": "1 x 4, 4 x 1"}
    amd = Facts(name="attend D128 bf16", arch="gfx942", **(FINE | change))
    assert page.cell(amd) == "7/8 ahead b3 1x4+4x1 2bar 400i 200r 1.5K x2"
    assert page.cell(Facts(name="x", arch="sm_90", **(FINE | {"loop": False, "must_pipeline": False}))) == "200r 80K x2"
    other = Facts(name="summaries D64 bf16", arch="sm_80", **FINE)
    lines = page._table(report.Report([worse, amd, other], [], ""))
    assert lines[0] == "| variant | sm_90 | gfx942 | sm_80 |"
    assert lines[3] == f"| summaries D64 bf16 | - | - | {plain} |"


def test_parts_of_names_with_commas_between() -> None:
    found = report.gather(("sm_90",), kernel="D128, summaries", jobs=1)
    assert [f.name for f in found.facts] == NAMES[1:3]
    assert found.selected == " --arch sm_90 --kernel 'D128, summaries'"


def test_an_interruption_leaves_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of compiling are stopped now and then; what was compiled is remembered, and the page says what is left."""
    plain = Made.facts

    def facts(self: Made, arch: str, name: str) -> Facts:
        if arch == "sm_86":
            raise KeyboardInterrupt
        return plain(self, arch, name)

    monkeypatch.setattr(Made, "facts", facts)
    with pytest.raises(ValueError, match="Interrupted: 18 of 21 variants are left out; the same command goes on"):
        run("--jobs", "1", "--markdown", str(tmp_path / "r.md"))
    text = (tmp_path / "r.md").read_text()
    assert "Interrupted: 18 of 21 variants are left out" in text
    assert text.count("| attend D128 bf16 |") == 1
    assert Made.closed == 1


def test_a_broken_aim_is_an_error_after_all_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "Compiler", Broken)
    with pytest.raises(ValueError, match="1 of 4 variants break an aim: broken D64 for sm_80: it is broken"):
        run("--arch", "sm_80", "--json", str(tmp_path / "r.json"))
    assert len(json.loads((tmp_path / "r.json").read_text())["variants"]) == 3
    assert "attend D64 bf16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--arch", "sm_91"], "unknown architecture 'sm_91': did you mean 'sm_90'"),
        (["--arch", ","], "--arch names nothing: ','"),
        (["--kernel", "atend D64 bf16"], "unknown kernel 'atend D64 bf16': did you mean 'attend D64 bf16'"),
        (["--jobs", "0"], "--jobs takes whole numbers"),
        (["--jobs", "two"], "--jobs takes whole numbers from 1 up, like 128 or 32k, got 'two'"),
    ],
)
def test_bad_input(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*argv)
    assert not Made.threads  # nothing was compiled


def test_jobs_must_be_some() -> None:
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        report.gather(jobs=0)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("closecall_lab.audit.compile.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs triton, which is not installed: pip install 'closecall\[triton\]'"):
        Compiler()
