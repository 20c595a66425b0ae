"""`closecall bench growth`: fits whose answer is known, what is said and drawn of made-up times, and a small run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import closecall
from closecall import cli
from closecall_lab.bench import growth_report
from closecall_lab.bench.benchmarks import growth
from closecall_lab.bench.growth_report import Growth, conclusions, exponent, local, matters

K = 1024
KEY = ("bf16", 128, 1, "auto@33")


def test_exponents_of_power_laws() -> None:
    contexts = [8.0, 16.0, 64.0]
    assert exponent(contexts, [3 * n**1.5 for n in contexts]) == pytest.approx(1.5)
    assert local(contexts, [n**2 for n in contexts]) == [None, pytest.approx(2), pytest.approx(2)]


def test_the_quadratic_part_is_told_from_the_linear() -> None:
    contexts = [8.0 * K, 16.0 * K, 32.0 * K, 128.0 * K]
    found = Growth.fit(contexts, [2e-5 * n + 3e-10 * n * n for n in contexts])
    assert found.linear == pytest.approx(2e-5)
    assert found.quadratic == pytest.approx(3e-10)
    assert Growth.fit(contexts, [5e-5 * n for n in contexts]).quadratic == pytest.approx(0, abs=1e-18)
    square = Growth.fit(contexts, [2e-10 * n * n for n in contexts])
    assert square.quadratic == pytest.approx(2e-10)
    assert square.linear == pytest.approx(0, abs=1e-12)
    below = Growth.fit(contexts, [n**0.5 for n in contexts])  # grows less than linearly: no negative square
    assert below.quadratic == 0
    assert below.linear > 0


def test_where_selection_begins_to_matter() -> None:
    chosen, attended = Growth(1e-5, 2e-10), Growth(9e-5, 0.0)
    at = matters(chosen, attended, share=0.1)
    assert at is not None
    assert 2e-10 * at * at == pytest.approx(0.1 * (chosen.at(at) + attended.at(at)))
    assert matters(Growth(1e-5, 0.0), attended) is None  # no quadratic part
    assert matters(Growth(0.0, 1e-12), Growth(0.0, 1e-10)) is None  # attention is quadratic too, and larger


def test_what_is_concluded() -> None:
    rows = [
        {"context": n * K, "selection": 1e-5 * n * K + 2e-10 * (n * K) ** 2, "attention": 9e-5 * n * K}
        for n in (8, 16, 32)
    ]
    rows = [row | {"both": row["selection"] + row["attention"]} for row in rows]
    said = conclusions(KEY, rows)
    assert "fitted over 8K to 32K" in said[0]
    assert "attention n^1.00" in said[0]
    at = matters(Growth(1e-5, 2e-10), Growth(9e-5, 0.0))
    assert at is not None
    assert f"from {at / K:,.0f}K tokens on (beyond what was measured)" in said[1]
    assert re.search(r"fitted as 1e-05 n \+ 2e-10 n\^2 seconds", said[1])
    assert "nothing to fit" in conclusions(KEY, rows[:1])[0]
    long = [row | {"context": 16 * row["context"]} for row in rows]
    assert any("from 128K on" in line for line in conclusions(KEY, long))


def cell_of(context: int, **changes: Any) -> dict[str, Any]:
    variant = ["auto", 33, closecall.policy("auto", budget=33, pool=8).to_json()]
    shared = {"heads": 4, "kv_heads": 1, "dtype": "bf16", "dim": 128, "threads": 1, "tier": "avx512"}
    return {"context": context, "variants": [variant], **shared, **changes}


def result_of(select: float, attend: float, dense: float, rows: int) -> dict[str, Any]:
    laps = {"auto@33": [{"select": select, "attend": attend}] * 3, "sdpa": [{"": 2 * dense}] * 3}
    extra = {"auto@33": 12.0, "sdpa": 0.0, "dense": 0.0}
    return {
        "laps": laps | {"dense": [{"": dense}] * 3}, "dense_rows": rows, "rounds": 3, "sdpa_form": "enable_gqa",
        "extra_mib": extra, "kept": {"auto@33": 66.0},
    }  # fmt: skip


MACHINE = {"cpu": "a CPU", "torch": "2.13"}


def test_what_was_measured_on_fewer_rows_is_multiplied_and_marked() -> None:
    measured = [
        (cell_of(16 * K), result_of(0.1, 0.9, 3.0, 16 * K)),
        (cell_of(64 * K), result_of(0.5, 3.5, 3.0, 4 * K)),
    ]
    short, long = growth_report.series(measured)[KEY]
    assert (short["dense"], short["sdpa"], short["vs_sdpa"]) == (3.0, 6.0, 6.0)
    assert (long["dense"], long["sdpa"], long["vs_dense"]) == (48.0, 96.0, 12.0)
    assert (short["share"], long["share"]) == (0.1, 0.125)
    text = growth_report.table(MACHINE, measured).text(width=1000)
    assert "64K on 4096 rows" in text
    line = next(x for x in text.splitlines() if x.strip().startswith("64K"))
    assert "~96.0" in line
    assert "~48.0" in line
    assert "12.5%" in line
    assert "~" not in growth_report.table(MACHINE, measured[:1]).text()
    drawn = growth_report.figure(MACHINE, measured)
    labels = [axes.get_ylabel() for axes in drawn.axes]
    assert [label for label in labels if label] == ["seconds", "selection's share", "extra MiB"]
    assert [text.get_text() for text in drawn.axes[0].texts] == ["at 64K: 24x SDPA, 12x dense"]
    hollow = [x for x in drawn.axes[0].lines if x.get_markerfacecolor() == "white"]
    assert len(hollow) == 2  # both baselines, at 64K


@pytest.mark.parametrize("context", [K, 16 * K, 17 * K, 64 * K, K * K])
def test_dense_attention_is_measured_on_rows_that_see_what_rows_see_on_average(context: int) -> None:
    rows = growth.dense_rows(context)
    assert rows == context if context <= 16 * K else rows % 64 == 0
    assert rows * context <= growth.WHOLE**2
    assert rows >= 64


def test_the_baselines_on_rows_from_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our dense kernel gives these rows what it gives them in the whole prompt; SDPA does as many products."""
    monkeypatch.setattr(growth, "WHOLE", 256)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 512, 16, generator=generator) for h in (4, 1, 1))
    assert growth.dense_rows(512) == 128
    _, sdpa, dense = growth.baselines(q, k, v)
    whole = closecall.attention(q, k, v, "dense")
    torch.testing.assert_close(dense(), whole[:, :, 192:320])
    half = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, 192:320], k[:, :, :256], v[:, :, :256], enable_gqa=True
    )
    torch.testing.assert_close(sdpa(), half)


def test_a_small_run_and_its_continuation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(contexts: str) -> str:
        argv = ["bench", "growth", "--contexts", contexts, "--dims", "16", "--heads", "2", "--dtypes", "fp32"]
        argv += ["--policies", "quest:pool=8,auto:pool=8", "--budget", "4", "--seconds", "0.05", "--out", str(tmp_path)]
        assert cli.main(argv) == 0
        return capsys.readouterr().err

    run("1k,2k")
    assert "2 of 3 cells are in" in run("1k,2k,3k")
    records = json.loads((tmp_path / "growth.json").read_text())["records"]
    assert [r["cell"]["context"] for r in records] == [K, 2 * K, 3 * K]
    assert {"quest:pool=8@4", "auto:pool=8@4", "sdpa", "dense"} == set(records[0]["result"]["laps"])
    assert {p.name for p in tmp_path.iterdir()} == {f"growth.{kind}" for kind in ("json", "md", "png", "svg")}
    assert "means of 8 rows" in (tmp_path / "growth.md").read_text()


def test_a_context_without_room_is_refused_before_anything_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", "growth", "--contexts", "1048576k", "--dtypes", "fp32"]
    assert cli.main(argv) == 2
    said = capsys.readouterr().err
    assert re.search(r"1048576K fp32 D=128, 1 thread needs about [\d,]+ bytes of memory", said)
    assert "fewer --heads" in said
