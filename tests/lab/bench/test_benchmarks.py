"""The benchmarks themselves, end to end on the smallest sizes that leave something out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from closecall import cli
from closecall.backends import cpu
from closecall.policy import policy
from closecall_lab.bench import base
from closecall_lab.bench import cli as bench_cli
from closecall_lab.bench.base import uncut
from closecall_lab.bench.profile.parts import around_attention
from closecall_lab.spine import memory
from closecall_lab.spine.options import counts

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
    argv += ["--policies", "quest,router-on-quest,quest:share=group", "--baselines", "sdpa,dense", "--out", tmp_path]
    bench(*argv)
    short, long = (r["result"] for r in records(tmp_path / "attention.json"))
    assert set(long["ms"]) == {"sdpa", "dense", "quest", "router-on-quest", "quest:share=group"}
    assert all(ms > 0 for ms in long["ms"].values())
    assert short["ours"]["router-on-quest"]["kept"] == 1  # 4 blocks, a tile may keep 6: it runs dense
    assert short["ours"]["router-on-quest"]["select_share"] == 0
    quest, routed, dense = (long["ours"][name] for name in ("quest", "router-on-quest", "dense"))
    assert quest["kept"] < routed["kept"] < dense["kept"] == 1
    # 8 tiles see 1 to 8 blocks and keep 6 at most; of the last two, one is triggered and keeps all its 7 or 8.
    assert long["ours"]["quest:share=group"]["effective_budget"] == quest["effective_budget"]
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
    argv = ["prefill", "--model", tiny, "--context", "256,512", "--dtype", "fp32", "--budget", 3, "--threads", 1]
    argv += ["--rounds", 2, "--policies", "dense,quest,router-on-quest", "--out", tmp_path]
    bench(*argv)
    said = capsys.readouterr()
    short, long = (r["result"] for r in records(tmp_path / "prefill.json"))
    assert list(long["laps"]) == ["unattached", "dense", "quest@3", "router-on-quest@3"]
    assert short["kept"]["quest@3"]["effective_budget"] is None  # it covers everything
    assert long["kept"]["quest@3"]["effective_budget"] == (1 + 2 + 3 + 4 + 5 + 6 + 6 + 6) / 8
    assert long["kept"]["router-on-quest@3"]["trigger_rate"] == 0.5
    warning = "quest@3 cuts nothing at 256: its budget covers every block there"
    assert all(warning in " ".join(text.split()) for text in (said.err, said.out))
    assert "cuts nothing at 256, 512" not in said.err
    assert "bound / SDPA" in (tmp_path / "prefill.md").read_text()
    assert {p.name for p in tmp_path.iterdir()} == {
        "prefill.json", "prefill.md", *(f"prefill{end}" for end in (".png", ".svg", "-parts.png", "-parts.svg"))
    }  # fmt: skip

    bench(*argv)
    assert "2 of 2 cells are in" in capsys.readouterr().err


def test_every_benchmark_is_found_and_cuts_something_when_quick() -> None:
    benchmarks = bench_cli.found()
    assert list(benchmarks) == ["attention", "decode", "decode-select", "growth", "prefill"]
    for name, module in benchmarks.items():
        for defaults in (module.FULL, module.QUICK):
            longest = max(counts("--contexts", defaults["contexts"]))
            budget = int(defaults.get("budget", 1))
            assert not uncut([(name, policy("quest", budget=budget))], [longest])
    quick = benchmarks["prefill"].QUICK
    contexts = counts("--contexts", quick["contexts"])
    assert not uncut([(n, policy(n, budget=int(quick["budget"]))) for n in ("topk", "quest")], contexts)


def test_where_results_go_is_checked_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(base, "run", lambda *_, **__: pytest.fail("measured"))
    assert cli.main(["bench", "decode", "--out", str(tmp_path / "file" / "deep")]) == 2
    assert f"--out {tmp_path / 'file' / 'deep'}: {tmp_path / 'file'} is a file" in capsys.readouterr().err


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_full_attention_is_entered_and_no_trace_left(implementation: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Olmo3Config(
        hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=8, layer_types=["sliding_attention", "full_attention", "full_attention"], sliding_window=4,
        pad_token_id=0, eos_token_id=1, attn_implementation=implementation,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    registry = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    before, local = dict(registry), dict(registry._local_mapping)
    entered = []

    @contextmanager
    def around() -> Iterator[None]:
        entered.append(1)
        yield

    ids = torch.arange(8)[None]
    with torch.no_grad():
        with around_attention(model, around):
            watched = model(ids).logits
        torch.testing.assert_close(watched, model(ids).logits, rtol=0, atol=0)
    assert len(entered) == 2  # both full layers, not the sliding one
    with pytest.raises(IndexError), torch.no_grad(), around_attention(model, around):
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
