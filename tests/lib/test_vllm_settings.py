"""What of the vLLM plugin needs no vLLM: settings, refusals, and where prompts are cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import closecall
from closecall.chunks import is_chunk_proof
from closecall.vllm.settings import ENVIRONMENT, RefusedError, Settings, aligned, layer_spans

ENGINE = {"version": "0.32.0", "chunk": 2048, "long_prefill": 0, "sequences": 256, "page": 128}


class TestReading:
    def test_nothing_asked(self, monkeypatch):
        monkeypatch.delenv(ENVIRONMENT, raising=False)
        assert Settings.read({}) is None
        assert Settings.read(None) is None
        assert Settings.read({"other": {"policy": "auto"}}) is None

    def test_a_preset_with_overrides_is_made_chunk_proof(self):
        read = Settings.read({"closecall": {"policy": "auto", "budget": 8, "layers": "3-5", "min_context": 4096}})
        assert read.policy.rule.tile_budget == 16
        assert is_chunk_proof(read.policy)
        assert read.layers == (3, 4, 5)
        assert read.min_context == 4096
        assert read.decode == "vllm"
        assert Settings.read({"closecall": {"policy": "auto", "decode": "closecall"}}).decode == "closecall"

    @pytest.mark.parametrize("text", ["auto", '{"policy": "auto"}', '"auto"'])
    def test_the_environment(self, monkeypatch, text):
        monkeypatch.setenv(ENVIRONMENT, text)
        assert Settings.read({}).policy.name == "auto"
        assert Settings.read({"closecall": "quest"}).policy.name == "quest"  # what the engine is told goes first

    def test_a_policy_from_a_file(self, tmp_path):
        made = closecall.policy("router-on-quest", trigger="absolute", threshold=0.2)
        (tmp_path / "p.json").write_text(made.to_json())
        assert Settings.read({"closecall": {"policy": str(tmp_path / "p.json")}}).policy == made
        with pytest.raises(RefusedError, match="budget cannot be given beside"):
            Settings.read({"closecall": {"policy": str(tmp_path / "p.json"), "budget": 3}})

    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            ({"policy": "autoo"}, "did you mean 'auto'"),
            ({"policy": 3}, "must name a policy"),
            ({"budget": 3}, "must name a policy"),
            ({"policy": "auto", "budgt": 3}, "budgt"),
            ({"policy": "auto", "budget": 1}, "tile budget 2 must exceed the 2 forced blocks"),
            ({"policy": "router"}, "closecall calibrate"),
            ({"policy": "none.json"}, "none.json"),
            ({"policy": "auto", "layers": "5-2"}, "layers"),
            ({"policy": "auto", "layers": []}, "layers"),
            ({"policy": "auto", "min_context": -1}, "min_context must be a whole number"),
            ({"policy": "auto", "decode": "closecal"}, "did you mean 'closecall'"),
            ({"policy": "auto", "metrics_port": "x"}, "metrics_port must be a whole number"),
        ],
    )
    def test_refusals_name_what_is_wrong(self, asked, said):
        with pytest.raises(RefusedError, match=said) as refused:
            Settings.read({"closecall": json.loads(json.dumps(asked))})
        assert str(refused.value).startswith("closecall for vLLM: ")

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"version": "0.31.2"}, "made for vLLM 0.32, and this is 0.31.2"),
            ({"version": "0.320.0"}, "made for vLLM 0.32"),
            ({"page": 96}, "pages of 96 tokens do not hold whole tiles of 64: use --block-size 64"),
            ({"chunk": 300}, "max-num-batched-tokens 320 or more"),
            ({"long_prefill": 32}, "long_prefill_token_threshold = 32"),
        ],
    )
    def test_engines_that_cannot(self, change, said):
        settings = Settings.read({"closecall": "auto"})
        settings.check_engine(**ENGINE)
        with pytest.raises(RefusedError, match=said):
            settings.check_engine(**(ENGINE | change))


def test_a_tile_larger_than_a_page_is_refused():
    """A prefix cached in whole pages would cut it in two."""
    settings = Settings.read({"closecall": {"policy": "quest", "tile": 128}})
    settings.check_engine(**ENGINE)
    with pytest.raises(RefusedError, match="pages of 64 tokens do not hold whole tiles of 128: use --block-size 128"):
        settings.check_engine(**(ENGINE | {"page": 64}))


def test_another_policy_for_an_engine_that_runs():
    settings = Settings.read({"closecall": "auto"})
    assert settings.replaced(closecall.policy("quest", block=32, tile=32), 128).policy.tile == 32
    with pytest.raises(RefusedError, match="cuts prompts at tiles of 64 rows, and they would cut tiles of 128"):
        settings.replaced(closecall.policy("quest", tile=128), 128)
    with pytest.raises(RefusedError, match="pages of 64 tokens do not hold whole tiles of 128"):
        settings.replaced(closecall.policy("quest", block=128, tile=128), 64)
    with pytest.raises(ValueError, match="closecall calibrate"):
        settings.replaced(closecall.policy("router"), 128)


@given(st.integers(1, 3000), st.lists(st.integers(64, 900), min_size=1, max_size=60), st.integers(0, 4))
def test_prompts_are_cut_at_tiles_and_always_end(prompt, budgets, cached_pages):
    at = min(cached_pages * 128, (prompt - 1) // 128 * 128)
    for budget in budgets * 50:
        rows = aligned(at, min(budget, prompt - at), prompt, 64)
        assert 0 < rows <= budget
        at += rows
        if at == prompt:
            return
        assert at % 64 == 0
    raise AssertionError("the prompt never ended")


def test_rows_behind_the_prompt_are_not_cut():
    assert aligned(1000, 37, 1000, 64) == 37
    assert aligned(960, 70, 1000, 64) == 70
    assert aligned(64, 63, 1000, 64) == 0


def test_layer_spans():
    assert layer_spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
