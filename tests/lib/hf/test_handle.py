"""What attaching changes, what it says and measures, and that detaching leaves nothing behind."""

from __future__ import annotations

import copy
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomllib
import torch
import transformers

import closecall
import families
from closecall.certify import certificate
from closecall.hf import attach as attaching
from closecall.hf import forward
from closecall.hf import handle as handles
from closecall.hf.op import Ran
from closecall.policy import Policy
from families import tokens

SMALL = closecall.policy("router-on-quest", block=16, tile=16, budget=5, tile_factor=1, rho=1.4)
OTHER = closecall.policy("topk", block=16, tile=16, budget=4, tile_factor=1)

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture
def model() -> Any:
    return families.model("llama")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Ran]]:
    """Every call of our attention: its arguments and what came out."""
    seen: list[tuple[Any, Ran]] = []

    def spy(*args: Any) -> Ran:
        seen.append((args, run(*args)))
        return seen[-1][1]

    run = forward.run
    monkeypatch.setattr(forward, "run", spy)
    return seen


def everything_of(model: Any) -> list[tuple[Any, dict[str, Any]]]:
    """All attributes of all modules, with the objects themselves."""
    return [(module, dict(module.__dict__)) for module in model.modules()]


def assert_untouched(model: Any, before: list[tuple[Any, dict[str, Any]]], settings: dict[str, Any]) -> None:
    for module, attributes in before:
        assert list(module.__dict__) == list(attributes)
        assert all(module.__dict__[key] is value for key, value in attributes.items())
    assert model.config.__dict__ == settings


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "qwen3_next"])
def test_detaching_restores_exactly(name: str) -> None:
    model, x = families.model(name), tokens(1, 150)
    before, settings, own = everything_of(model), dict(model.config.__dict__), model(x).logits
    handle = closecall.attach(model, SMALL)
    assert handle.attached
    assert model.config._attn_implementation.startswith("closecall_")
    assert float((model(x).logits - own).abs().max()) > 0.01
    model.generate(x, max_new_tokens=2, do_sample=False)
    handle.detach()
    assert not handle.attached
    assert_untouched(model, before, settings)
    assert torch.equal(model(x).logits, own)
    handle.detach()  # twice does no harm
    assert_untouched(model, before, settings)


def test_an_exception_detaches(model: Any) -> None:
    before, settings = everything_of(model), dict(model.config.__dict__)
    with pytest.raises(ZeroDivisionError), closecall.attach(model, SMALL):
        raise ZeroDivisionError
    assert_untouched(model, before, settings)


def test_an_interrupted_attach_leaves_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, settings = everything_of(model), dict(model.config.__dict__)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(handles, "AttachedLayer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        closecall.attach(model, SMALL)
    assert_untouched(model, before, settings)


def test_two_models_with_two_policies_and_one_config() -> None:
    settings = families.config("llama")
    first, second = families.build(settings, seed=1), families.build(settings, seed=2)
    assert first.config is second.config
    x = tokens(1, 150)
    with closecall.attach(first, SMALL):
        alone = first(x).logits
    with closecall.attach(second, OTHER):
        other_alone, own = second(x).logits, first(x).logits
        with closecall.attach(first, SMALL) as handle:
            assert torch.equal(first(x).logits, alone)
            assert torch.equal(second(x).logits, other_alone)
            assert handle.policy == SMALL
        assert torch.equal(first(x).logits, own)
        assert torch.equal(second(x).logits, other_alone)
    assert first.config is second.config
    assert float((own - alone).abs().max()) > 0.01


def test_attaching_twice_is_refused(model: Any) -> None:
    with closecall.attach(model, SMALL) as handle:
        for again in (model, model.model):
            with pytest.raises(ValueError, match=r"attached already: call detach\(\)"):
                closecall.attach(again, OTHER)
        assert handle.attached
    with closecall.attach(model.model, SMALL), pytest.raises(ValueError, match=r"attached already"):
        closecall.attach(model, SMALL)
    closecall.attach(model, OTHER).detach()


def test_a_copy_of_an_attached_model_says_why_it_cannot_be_attached(model: Any) -> None:
    with closecall.attach(model, SMALL):
        twin = copy.deepcopy(model)
    with pytest.raises(ValueError, match="copy of an attached model has none: copy it before you attach it"):
        closecall.attach(twin, SMALL)


def test_another_attention_set_meanwhile_is_said(model: Any) -> None:
    before = model.config._attn_implementation
    handle = closecall.attach(model, SMALL)
    model.set_attn_implementation("eager")
    with pytest.warns(UserWarning, match=r"was set to 'eager' while it was attached, and closecall did not run since"):
        handle.detach()
    assert model.config._attn_implementation == before


def test_the_table(model: Any) -> None:
    with closecall.attach(families.model("gpt_oss"), SMALL, layers=[2]) as handle:
        lines = str(handle).splitlines()
    assert lines[0] == f"closecall on GptOssForCausalLM: {SMALL}"
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "0 model.layers.0.self_attn sliding left alone: keeps its window of 24",
        "1 model.layers.1.self_attn full dense, on our kernel: not among layers=",
        "2 model.layers.2.self_attn full sparse",
    ]
    with closecall.attach(families.model("qwen3_5"), "dense") as handle:
        said = str(handle)
    assert "linear         left alone: no softmax attention" in said
    assert said.count("dense, on our kernel") == 2


def test_layers_and_min_context(model: Any, ran: list[tuple[Any, Ran]]) -> None:
    x = tokens(1, 150)
    own = model(x).logits
    with closecall.attach(model, SMALL, layers=[1]) as handle:
        model(x)
        stats = handle.stats()
    assert [s["sparse_calls"] for s in stats.values()] == [0, 1, 0]
    assert [call.kept is None for _, call in ran] == [True, False, True]
    with closecall.attach(model, SMALL, min_context=151) as handle:
        assert float((model(x).logits - own).abs().max()) < 1e-4
        assert all(s["sparse_calls"] == 0 for s in handle.stats().values())
    with closecall.attach(model, SMALL, min_context=150) as handle:
        model(x)
        assert all(s["sparse_calls"] == 1 for s in handle.stats().values())


def test_layers_not_chosen_compute_what_they_did(model: Any) -> None:
    x = tokens(2, 150)
    mask = torch.ones_like(x)
    mask[0, :41] = 0
    everything = closecall.policy("topk", block=16, tile=16, budget=32)
    with closecall.attach(model, everything, layers=[1]):
        got = model(x, attention_mask=mask).logits[mask.bool()]
    with families.Float64():
        wanted = families.exact("llama")(x, attention_mask=mask).logits[mask.bool()]
    families.assert_close(got, families.eager("llama")(x, attention_mask=mask).logits[mask.bool()], wanted)


def test_decode_is_dense_unless_asked(model: Any) -> None:
    x = tokens(1, 150)
    for decode, sparse_calls in (("dense", 1), ("sparse", 4)):
        with closecall.attach(model, SMALL, decode=decode) as handle:
            model.generate(x, max_new_tokens=4, min_new_tokens=4, do_sample=False)
            assert [s["calls"] for s in handle.stats().values()] == [4, 4, 4]
            assert [s["sparse_calls"] for s in handle.stats().values()] == [sparse_calls] * 3


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_auto_is_dense_where_sparse_would_not_pay(name: str) -> None:
    with closecall.attach(families.model(name), "auto") as handle:
        assert handle.policy == closecall.policy("auto")
        assert f"  dense below {handle.min_context} keys\n" in str(handle)
        assert handle.warnings(handle.min_context) == []
        short, least = handle.min_context - 1, handle.min_context
        assert handle.warnings(short) == [
            f"auto ran dense: the prompt has {short:,} tokens, and it begins to cut at {least:,}"
        ]
    assert handle.min_context > 64 * 66
    small = closecall.policy("auto", block=16, tile=16, budget=5, tile_factor=1)
    with closecall.attach(families.model(name), small) as handle:
        for length, sparse in ((handle.min_context - 1, 0), (handle.min_context, 1)):
            families.model(name)(tokens(1, length))
            assert all(s["sparse_calls"] == sparse for s in handle.stats().values() if s["calls"])
    with closecall.attach(families.model(name), "auto", min_context=5) as handle:
        assert handle.min_context == 5


def test_a_policy_as_text_or_file(model: Any, tmp_path: Path) -> None:
    SMALL.save(tmp_path / "policy.json")
    for given, expected in (
        ("router-on-quest", closecall.policy("router-on-quest")),
        ("auto:budget=8", closecall.policy("auto", budget=8)),
        (str(tmp_path / "policy.json"), SMALL),
        (tmp_path / "policy.json", SMALL),
    ):
        with closecall.attach(model, given) as handle:
            assert handle.policy == expected
    with closecall.attach(model, "auto:budget=8") as handle:
        assert handle.min_context == 2 * 16 * 64


def test_the_oldest_transformers_is_the_one_we_ask_for(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert (
        f"transformers>={attaching.OLDEST[0]}.{attaching.OLDEST[1]}"
        in declared["project"]["optional-dependencies"]["hf"]
    )
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.21.9")  # importing it made another object of it
    with pytest.raises(ValueError, match=r"needs transformers 5\.22 or newer, not 5\.21\.9"):
        closecall.attach(model, SMALL)


COVERS = closecall.policy("topk", block=16, tile=16, budget=32)  # 64 blocks of 16 keys a tile


@pytest.mark.parametrize(
    ("policy", "tokens_", "expected"),
    [
        # 16 blocks of 16 keys a tile: auto begins to cut at twice that.
        (
            closecall.policy("auto", block=16, tile=16, budget=8),
            500,
            r"auto never cut anything: the prompt has 500 tokens, and it begins to cut at 512\. "
            r"For prompts of this length try budget=2, or pass min_context=0",
        ),
        (
            COVERS,
            300,
            r"topk never cut anything: the prompt has 300 tokens, and a tile may keep 64 blocks, which hold 1,024",
        ),
        # Without a minimum it would keep everything all the same: no use to recommend that.
        (closecall.policy("auto", block=16, tile=16, budget=16), 200, r"begins to cut at 1,024\. .* try budget=2$"),
        (COVERS, 60, r"Longer prompts are what it is for"),
    ],
)
def test_a_policy_that_never_cut_says_so_once(model: Any, policy: Policy, tokens_: int, expected: str) -> None:
    for leave in (closecall.Handle.detach, lambda handle: handle.__exit__(None, None, None)):
        handle = closecall.attach(model, policy)
        model(tokens(1, 20))
        model(tokens(1, tokens_))
        with pytest.warns(UserWarning, match=expected) as said:
            leave(handle)
        assert len(said) == 1
        with warnings.catch_warnings(action="error"):
            leave(handle)


def test_the_budget_it_names_does_cut(model: Any) -> None:
    with closecall.attach(model, closecall.policy("auto", block=16, tile=16, budget=2)) as handle:
        model(tokens(1, 500))
    assert handle.stats().total["kept_fraction"] < 1


def test_no_warning_without_a_reason(model: Any) -> None:
    def fails() -> None:
        with closecall.attach(model, COVERS):
            model(tokens(1, 300))
            raise ZeroDivisionError

    with warnings.catch_warnings(action="error"):
        closecall.attach(model, COVERS).detach()  # nothing was run
        with closecall.attach(model, "dense"):
            model(tokens(1, 150))
        with closecall.attach(model, SMALL):  # it cut once
            model(tokens(1, 20))
            model(tokens(1, 150))
        with closecall.attach(model, COVERS):
            model(tokens(1, 1))  # a decoding step
        with pytest.raises(ZeroDivisionError):  # there is something more important to say
            fails()


def test_statistics_as_a_table(model: Any) -> None:
    with closecall.attach(model, OTHER, layers=[1, 2]) as handle:
        model(tokens(1, 150))
    stats = handle.stats()
    lines = str(stats).splitlines()
    assert lines[0] == str(OTHER)
    assert lines[1].split() == [
        "layer",
        "calls",
        "sparse",
        "blocks",
        "a",
        "tile",
        "kept",
        "selection",
        "s",
        "attention",
        "s",
    ]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1", "2", "all"]
    assert lines[2].split()[1:5] == ["1", "0", "-", "-"]  # dense: nothing was selected
    assert "nan" not in str(stats)
    total = stats.total
    assert total["kept_fraction"] == pytest.approx((stats[1]["kept_fraction"] + stats[2]["kept_fraction"]) / 2)
    assert total["attend_seconds"] == pytest.approx(sum(s["attend_seconds"] for s in stats.values()))
    assert total["calls"] == 1
    assert lines[-1].split()[4] == f"{total['kept_fraction']:.1%}"
    assert stats == dict(stats)  # and still a dict


@pytest.mark.parametrize("name", ["router", "auto", "topk", "fill-on-mean"])
def test_only_a_trigger_has_a_rate(model: Any, name: str) -> None:
    policy = closecall.policy(name, block=16, tile=16, budget=3)
    with closecall.attach(model, policy) as handle:
        model(tokens(1, 300))
    rates = [layer["trigger_rate"] for layer in handle.stats().values()]
    assert handle.stats().total["sparse_calls"] == 1
    assert all(math.isnan(rate) for rate in rates) == (name != "router")
    assert ("triggered" in str(handle.stats()).splitlines()[1]) == (name == "router")


def test_nothing_ran(model: Any) -> None:
    handle = closecall.attach(model, SMALL)
    assert str(handle.stats()).splitlines()[-1].split()[:3] == ["all", "0", "0"]
    handle.detach()


def test_what_needs_an_attached_model(model: Any, tmp_path: Path) -> None:
    handle = closecall.attach(model, SMALL)
    handle.detach()
    for late in (
        lambda: handle.record(tmp_path / "late"),
        lambda: handle.watch(lambda *_: None),
        lambda: handle.tap(lambda *_: None),
        lambda: handle.certify(0.1),
    ):
        with pytest.raises(ValueError, match=r"the model was detached.*attach it again first"):
            late()
    assert not (tmp_path / "late").exists()
    handle.record_stop()
    handle.watch(None)


def test_what_is_not_understood_is_refused_when_it_is_asked_for(model: Any) -> None:
    """And not in the middle of the next prefill."""
    with closecall.attach(model, SMALL) as handle:
        for tiles in (0, "x", True):
            with pytest.raises(ValueError, match=f"tiles must be a whole number of at least 1, .*, got {tiles!r}"):
                handle.certify(0.1, tiles=tiles)
        with pytest.raises(ValueError, match=r"eps must be in \[0, 1\], .*, got 'x'"):
            handle.certify("x")
        for ask in (handle.watch, handle.tap):
            with pytest.raises(TypeError, match=r"(watch|tap) takes a function of .*, got int"):
                ask(3)
        model(tokens(1, 50))


def test_certificates_of_a_sample_of_tiles(model: Any) -> None:
    """As many tiles as asked for, the last among them; with as many as there are, every row."""
    calls: list[Any] = []
    with closecall.attach(model, OTHER) as handle:
        handle.tap(lambda layer, call: calls.append(call))
        model(tokens(1, 310))
    q, k, v = calls[0].seen[:3]
    every = closecall.certify(q, k, v, calls[0].kept, scale=calls[0].scale)
    some = closecall.certify(q, k, v, calls[0].kept, scale=calls[0].scale, tiles=3)
    rows = some.real[0].nonzero()[:, 0].tolist()
    assert rows == [*range(80, 96), *range(192, 208), *range(304, 310)]  # tiles 5, 12 and 19 of 20
    assert torch.equal(some.mass[:, :, rows], every.mass[:, :, rows])
    assert float(some.mass[:, :, :80].abs().max()) == 0
    assert every.real.all()
    with pytest.raises(ValueError, match="tiles must be a whole number"):
        closecall.certify(q, k, v, calls[0].kept, tiles=0)
    for tiles, expected in ((3, some), (None, every), (8, None)):
        with closecall.attach(model, OTHER) as handle:
            handle.certify(0.5, tiles=tiles)
            model(tokens(1, 310))
        assert handle._attached[0].stats.rows == (4 * int(expected.real.sum()) if expected else 4 * (7 * 16 + 6))
        if expected is not None:
            assert handle.stats()[0]["certified"] == pytest.approx(expected.certified(0.5), abs=1e-9)


def test_certifying_takes_no_more_proofs_for_a_longer_prompt(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default at most 8 tiles of a call are proved, whatever its length: 30 layers stay seconds, not minutes."""
    proofs = []
    prove = certificate._certify_rows
    monkeypatch.setattr(certificate, "_certify_rows", lambda *args: (proofs.append(1), prove(*args))[1])
    counts = {}
    for tiles in (handles.CERTIFIED_TILES, None):
        for length in (310, 620):
            proofs.clear()
            with closecall.attach(model, OTHER) as handle:
                handle.certify(0.5, tiles=tiles)
                model(tokens(1, length))
            counts[tiles, length] = len(proofs)
    per_tile = len(handle.stats()) * model.config.num_key_value_heads
    assert 0 < counts[8, 310] <= counts[8, 620] <= 8 * per_tile
    assert counts[None, 620] > max(2 * counts[8, 620], 1.8 * counts[None, 310])  # all tiles that were cut


def test_selections_are_those_of_the_operator(model: Any, ran: list[tuple[Any, Ran]]) -> None:
    mask = torch.ones(2, 150, dtype=torch.bool)
    mask[0, :41] = False
    with closecall.attach(model, SMALL):
        model(tokens(2, 150), attention_mask=mask)
    assert len(ran) == 3
    for (q, k, *_), call in ran:
        expected = closecall.select(q, k, SMALL, scale=q.shape[-1] ** -0.5, key_padding=mask)
        assert call.kept is not None
        for part in ("kv_idx", "counts", "triggered"):
            assert torch.equal(getattr(call.kept, part), getattr(expected, part))


def test_stats_are_what_was_measured(model: Any, ran: list[tuple[Any, Ran]]) -> None:
    with closecall.attach(model, SMALL) as handle:
        for length in (300, 150, 40):
            model(tokens(1, length, seed=length))
    for layer, stats in handle.stats().items():  # also after detaching
        calls = [call for i, (_, call) in enumerate(ran) if i % 3 == layer]
        kept = [call.kept for call in calls if call.kept is not None]
        assert (stats["calls"], stats["sparse_calls"]) == (3, len(kept)) == (3, 2)
        counts = torch.cat([s.counts.flatten() for s in kept]).double()
        visible = torch.cat([s.geometry.visible.expand(s.counts.shape[1], -1).flatten() for s in kept])
        margins = torch.cat([s.margin.flatten() for s in kept])
        margins = margins[~margins.isnan()]
        triggered = sum(int(s.triggered.sum()) for s in kept)
        assert stats["effective_budget"] == pytest.approx(float(counts.mean()))
        assert stats["kept_fraction"] == pytest.approx(float(counts.sum() / visible.sum()))
        assert stats["trigger_rate"] == pytest.approx(triggered / len(margins))
        assert stats["trigger_rate"] >= 0.4
        for quantile in (0.1, 0.5, 0.9):
            exact = np.quantile(margins.numpy(), quantile, method="inverted_cdf")
            assert stats[f"margin_p{quantile * 100:.0f}"] == pytest.approx(exact, abs=1 / 4096)
        assert stats["select_seconds"] == pytest.approx(sum(call.select_seconds for call in calls))
        assert stats["attend_seconds"] == pytest.approx(sum(call.attend_seconds for call in calls))
        assert stats["select_seconds"] > 0


def test_recording(model: Any, ran: list[tuple[Any, Ran]], tmp_path: Path) -> None:
    with closecall.attach(model, SMALL) as handle:
        handle.record(tmp_path / "run", scores=True)
        model(tokens(2, 150))
        handle.record_stop()
        model(tokens(2, 150))
    lines = [json.loads(line) for line in (tmp_path / "run" / "index.jsonl").read_text().splitlines()]
    assert [line["layer"] for line in lines] == [0, 1, 2]
    for line, (_, call) in zip(lines, ran[:3], strict=True):
        assert (line["block"], line["tile"], line["q_len"], line["k_len"], line["n_blocks"]) == (16, 16, 150, 150, 10)
        arrays = np.load(tmp_path / "run" / line["file"], allow_pickle=False)
        assert call.kept is not None
        for part in ("kv_idx", "counts", "margin", "triggered"):
            assert np.array_equal(arrays[part], getattr(call.kept, part).numpy(), equal_nan=part == "margin")
        # The best unforced block of the last tile is among the kept ones.
        scores = arrays["tile_scores"]
        assert scores.shape == (2, 4, 10, 10)
        best = scores[:, :, 9, 1:9].argmax(-1) + 1
        assert (arrays["kv_idx"][:, :, 9] == best[..., None]).any(-1).all()


def test_recording_is_bounded(model: Any, tmp_path: Path) -> None:
    with closecall.attach(model, SMALL) as handle:
        handle.record(tmp_path / "probe")
        model(tokens(1, 150))
        one = sum(f.stat().st_size for f in (tmp_path / "probe").iterdir()) / 3
        limit = int(2.5 * one)
        handle.record(tmp_path / "run", max_bytes=limit)
        for _ in range(3):
            model(tokens(1, 150))
    files = list((tmp_path / "run").iterdir())
    assert one < sum(f.stat().st_size for f in files) <= limit
    lines = [json.loads(line) for line in (tmp_path / "run" / "index.jsonl").read_text().splitlines()]
    assert "byte limit" in lines[-1]["stopped"]
    assert {line["file"] for line in lines[:-1]} == {f.name for f in files if f.suffix == ".npz"}


def test_recording_refuses_what_is_there(model: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with closecall.attach(model, SMALL) as handle:
        with pytest.raises(FileExistsError, match=r"not empty: record into a new directory"):
            handle.record(tmp_path)
        with pytest.raises(ValueError, match=r"max_bytes"):
            handle.record(tmp_path / "new", max_bytes=0)
        model(tokens(1, 150))
    assert [f.name for f in tmp_path.iterdir()] == ["mine.txt"]


def test_saving_while_attached_writes_the_model_as_it_was(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "before")
    with closecall.attach(model, SMALL):
        model.save_pretrained(tmp_path / "attached")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "attached" / name).read_bytes() == (tmp_path / "before" / name).read_bytes()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "attached")
    assert loaded.config._attn_implementation == model.config._attn_implementation
    x = tokens(1, 50)
    assert torch.equal(loaded(x).logits, model(x).logits)


def test_watching_sees_every_selection_until_told_to_stop(model: Any, ran: list[tuple[Any, Ran]]) -> None:
    seen: list[tuple[int, closecall.Selection]] = []
    with closecall.attach(model, SMALL) as handle:
        handle.watch(lambda layer, selection: seen.append((layer, selection)))
        model(tokens(1, 150))
        assert [layer for layer, _ in seen] == list(handle.stats())
        assert all(selection is call.kept for (_, selection), (_, call) in zip(seen, ran, strict=True))
        handle.watch(None)
        model(tokens(1, 150))
    assert len(ran) == 2 * len(seen)
