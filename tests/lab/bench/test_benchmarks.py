"""The benchmarks themselves, end to end on the smallest sizes that leave something out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from closecall import cli
from closecall.backends import cpu
from closecall_lab.bench import prefill
from closecall_lab.spine import memory, stopwatch
from closecall_lab.spine.timing import Samples

SHORT = ["--threads", "1", "--seconds", "0.01", "--repeats", "3"]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def bench(*argv: object) -> None:
    assert cli.main(["bench", *map(str, argv)]) == 0


def records(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    found: list[dict[str, Any]] = json.loads(path.read_text(), parse_constant=refuse)["records"]
    return found


def test_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["attention", "--contexts", "256,512", "--dtypes", "fp32", "--dims", 64, "--budget", 3, *SHORT]
    argv += ["--policies", "quest,router-on-quest", "--baselines", "sdpa,dense", "--out", tmp_path]
    bench(*argv)
    short, long = (r["result"] for r in records(tmp_path / "attention.json"))
    assert set(long["ms"]) == {"sdpa", "dense", "quest", "router-on-quest"}
    assert all(ms > 0 for ms in long["ms"].values())
    assert short["ours"]["router-on-quest"]["kept"] == 1  # 4 blocks, a tile may keep 6: it runs dense
    assert short["ours"]["router-on-quest"]["select_share"] == 0
    quest, routed, dense = (long["ours"][name] for name in ("quest", "router-on-quest", "dense"))
    assert quest["kept"] < routed["kept"] < dense["kept"] == 1
    # 8 tiles see 1 to 8 blocks and keep 6 at most; of the last two, one is triggered and keeps all its 7 or 8.
    assert quest["effective_budget"] == (1 + 2 + 3 + 4 + 5 + 6 + 6 + 6) / 8
    assert quest["effective_budget"] < routed["effective_budget"] <= quest["effective_budget"] + 2 / 8
    assert 0 < routed["select_share"] < 1
    assert (dense["share_of_peak"] is not None) == (dense["best_share_of_peak"] is not None) == bool(cpu.tiers())
    shown = capsys.readouterr().out
    assert "vs our dense" in shown
    assert "keep 6 blocks a tile (budget 3 x 2)" in shown
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".md", ".png", ".svg"}

    bench(*argv)
    assert "2 of 2 cells are in" in capsys.readouterr().err
    assert len(records(tmp_path / "attention.json")) == 2


def test_decode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench("decode", "--contexts", 256, "--dtypes", "fp32,bf16", "--dims", 32, "--heads", 4, "--kv-heads", 2,
          "--out", tmp_path, *SHORT)  # fmt: skip
    found = records(tmp_path / "decode.json")
    assert [r["cell"]["dtype"] for r in found] == ["fp32", "bf16"]
    for record in found:
        (row,) = record["result"]["rows"]
        assert row["vs_sdpa"] > 0
        assert row["gb_per_second"] > 0
        assert row["one_thread_over_all"] is None
    assert "Decode: " in capsys.readouterr().out


@pytest.mark.skipif(not cpu.tiers(), reason="no native code")
def test_isa_is_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOSECALL_ISA", "")  # so that it is put back: the option sets it for the process
    slowest = cpu.tiers()[-1]
    bench("decode", "--contexts", 256, "--dtypes", "fp32", "--dims", 32, "--isa", slowest, "--out", tmp_path, *SHORT)
    assert records(tmp_path / "decode.json")[0]["cell"]["tier"] == slowest
    assert os.environ["CLOSECALL_ISA"] == slowest


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32, max_position_embeddings=512, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w2"))
    directory = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(directory)
    return directory


def test_prefill(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["prefill", "--model", tiny, "--context", "256,512,1k", "--dtype", "fp32", "--budget", 3, *SHORT]
    argv += ["--policies", "dense,quest,router-on-quest", "--out", tmp_path]
    bench(*argv)
    said = capsys.readouterr()
    short, long = (r["result"] for r in records(tmp_path / "prefill.json"))  # 1K is longer than its training
    warning = "was trained on 512 tokens, so these were not run: 1K."
    assert all(warning in text for text in (said.err, said.out, (tmp_path / "prefill.md").read_text()))
    for result in (short, long):
        for row in (result["unattached"], *result["ours"].values()):
            assert 0 < row["attention_seconds"] < row["seconds"]
            assert 0 < row["attention_share"] < 1
        for row in result["ours"].values():
            assert row["over_unattached"] > 0
            assert row["over_bound"] > 0
        assert result["ours"]["dense"]["over_dense"] == 1
    assert short["ours"]["quest"]["effective_budget"] is None  # it covers everything
    assert long["ours"]["quest"]["effective_budget"] == (1 + 2 + 3 + 4 + 5 + 6 + 6 + 6) / 8
    assert long["ours"]["quest"]["trigger_rate"] == 0
    assert long["ours"]["router-on-quest"]["trigger_rate"] == 0.5
    assert "bound / SDPA" in said.out
    assert {p.name for p in tmp_path.iterdir()} == {f"prefill.{suffix}" for suffix in ("json", "md", "png", "svg")}

    bench(*argv)
    assert "2 of 2 cells are in" in capsys.readouterr().err


def test_prefill_past_all_training(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "prefill", "--model", str(tiny), "--context", "1k,2k", "--out", str(tmp_path)]) == 2
    assert "was trained on 512 tokens" in capsys.readouterr().err


def test_what_amdahl_allows() -> None:
    samples = Samples(
        {
            "unattached": [{"attention": 6.0, "rest": 4.0}] * 3,
            "dense": [{"attention": 4.0, "rest": 4.0}] * 3,
            "quest": [{"attention": 1.0, "rest": 5.0}] * 3,
        }
    )
    row = prefill._row("quest", samples)
    assert row["seconds"] == 6
    assert row["over_unattached"] == 0.6
    assert row["over_dense"] == 0.75
    assert row["bound_over_unattached"] == 0.5  # 4 of the rest and 1 of attention, over 10
    assert row["over_bound"] == 1.2


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_stopwatch_times_full_attention_and_leaves_no_trace(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Olmo3Config(
        hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=8, layer_types=["sliding_attention", "full_attention", "full_attention"], sliding_window=4,
        pad_token_id=0, eos_token_id=1, attn_implementation=implementation,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    registry = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    before, local = dict(registry), dict(registry._local_mapping)
    ticks = iter(range(1000))
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        with stopwatch.stopwatch(model) as watch:
            timed = model(ids).logits
        torch.testing.assert_close(timed, model(ids).logits, rtol=0, atol=0)
    assert watch.seconds == 2  # a tick for each full layer, none for the sliding one
    with pytest.raises(IndexError), torch.no_grad(), stopwatch.stopwatch(model):
        model(ids + 1)  # one token past the vocabulary
    assert dict(registry) == before
    assert registry._local_mapping == local


def test_extra_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = memory.mark()
    if before is None:
        pytest.skip("this system does not tell")
    extra = memory.extra_since(before, torch.ones(2**22))  # 16 MiB of output, which does not count
    assert extra is not None
    assert extra < 8 * 2**20
    before = memory.mark()
    torch.ones(2**23)  # 32 MiB, gone again
    extra = memory.extra_since(before, None)
    assert extra is not None
    assert 24 * 2**20 < extra < 48 * 2**20
