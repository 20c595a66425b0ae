from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from closecall.cli import main
from closecall.models import catalogue as panel
from closecall.models import known
from closecall.models import text as panel_text
from closecall.models.entry import Entry, budget_for
from closecall.policy import Policy, as_policy
from closecall.tuned import shipped, tuned_at

PAPER = {
    "Qwen/Qwen2.5-14B-Instruct": (48, 40, 8, 128),
    "Qwen/Qwen2.5-7B-Instruct-1M": (28, 28, 4, 128),
    "mistralai/Mistral-Nemo-Instruct-2407": (40, 32, 8, 128),
    "Qwen/Qwen3.6-35B-A3B": (40, 16, 2, 256),
}

entries = pytest.mark.parametrize("entry", panel.PANEL, ids=lambda e: e.name)


def test_names_and_hub_ids_are_told_apart() -> None:
    keys = [e.name for e in panel.PANEL] + [e.hub_id.lower() for e in panel.PANEL]
    assert len(set(keys)) == len(keys)
    assert all(e.name == e.name.lower() and e.hub_id.count("/") == 1 for e in panel.PANEL)


def test_the_papers_four_are_as_the_paper_says() -> None:
    found = {e.hub_id: (e.layers, e.q_heads, e.kv_heads, e.head_dim) for e in panel.PANEL if e.in_paper}
    assert found == PAPER
    assert dict(panel.get("mistral-nemo").tokenizer_options) == {"fix_mistral_regex": True}
    hybrid = panel.get("qwen3.6-35b")
    assert dict(hybrid.template_options) == {"enable_thinking": False}
    assert hybrid.choice_prefill == "The correct answer is ("
    assert hybrid.full_layers == 10


def test_every_family_asked_for_is_there() -> None:
    types = {e.model_type for e in panel.PANEL}
    assert {"llama", "gemma3", "qwen3", "minimax", "minimax_m2", "gpt_oss", "glm4"} <= types


@entries
def test_an_entry_is_consistent(entry: Entry) -> None:
    assert entry.q_heads % entry.kv_heads == 0
    mixed = {"sliding", "linear"} & set(entry.kinds)
    assert (entry.full_layers < entry.layers) == bool(mixed)
    assert (entry.window is not None) == ("sliding" in entry.kinds)
    assert entry.sources
    assert entry.quirks


@entries
def test_the_recommended_policy_cuts(entry: Entry) -> None:
    policy = entry.policy()
    assert policy.name == "auto"
    assert entry.recommended == f"auto:budget={policy.rule.tile_budget // 2}"
    assert Policy.from_json(policy.to_json()) == policy
    for context in (4096, 8192, entry.trained_context):
        chosen = entry.policy(context)
        # Twice the budget is where auto begins to cut: more than the context would be dense attention with extra steps.
        assert 2 * chosen.rule.tile_budget * chosen.block <= context
        assert chosen.rule.tile_budget > chosen.most_forced


@entries
def test_a_policy_that_we_tuned_to_the_model_is_named_with_its_multiple_for_the_longest_prompts(entry: Entry) -> None:
    lines = " ".join(panel_text.describe(entry).split())
    named = re.findall(r"tuned:[\w.-]+:times=\d+", lines)
    assert bool(named) == (entry.name in shipped())
    for text in named:
        times = int(text.rpartition("=")[2])
        assert times * tuned_at(entry.name) == entry.trained_context
        assert as_policy(text) == as_policy(f"tuned:{entry.name}").times(times)


@entries
def test_routers_are_the_papers_recommendation_not_ours(entry: Entry) -> None:
    assert "router" not in entry.recommended
    assert entry.paper_recommends.startswith("router (with" if entry.qk_norm else "router-on-quest (without")
    assert ("measured there on this model" in entry.paper_recommends) == entry.in_paper
    page = panel_text.describe(entry)
    assert "no router did better" in " ".join(page.split())
    assert ("not measured on this model" in " ".join(page.split())) == (not entry.measured)


def test_the_share_of_blocks() -> None:
    assert [budget_for(n) for n in (1, 4096, 8192, 20_000, 32_768, 33_792, 262_144)] == [4, 4, 8, 19, 32, 33, 33]


def test_every_file_is_an_entry() -> None:
    files = {path.stem for path in Path(known.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == {re.sub("[.-]", "_", name) for name in panel.names()}


def test_shapes() -> None:
    assert {"qwen2.5-7b-1m", "qwen3.6-35b", "qwen2.5-coder-1.5b", "smollm2"} <= set(panel.SHAPES)
    # 1.54B parameters, less the embeddings (151,936 x 1,536) and norms.
    assert panel.shape("Qwen2.5-Coder-1.5B-Instruct").weights == pytest.approx(1.31e9, rel=0.01)
    assert panel.get("gemma-3-270m").shape is None  # windowed layers cost something else
    assert panel.shape("qwen3.6-35b").mixed
    with pytest.raises(ValueError, match="unknown model shape"):
        panel.shape("gemma-3-270m")


def test_what_can_be_fetched_is_said_with_its_size_and_licence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "qwen2.5-coder-1.5b 1.1 GB 4.7 GB Apache-2.0" in lines
    assert "smollm2 93 MB 643 MB Apache-2.0" in lines
    assert any(line.startswith("gemma-3-270m 238 MB") and "Gemma terms" in line for line in lines)


@entries
def test_qk_norm_and_layer_kinds_are_those_of_transformers(entry: Entry) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(entry.model_type).get_text_config()
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = 4
    if kinds:
        config.layer_types = kinds[-4:]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert any(name.endswith("q_norm") for name, _ in model.named_modules()) == entry.qk_norm
    assert ("linear" in entry.kinds) == ("linear_attention" in (kinds or ()))
    assert ("sliding" in entry.kinds) == ("sliding_attention" in (kinds or ()))
    assert ("sinks" in entry.kinds) == any(name.endswith("sinks") for name, _ in model.named_parameters())


def test_finding_by_name_or_hub_id_in_any_case() -> None:
    assert panel.find("SmolLM2") is panel.get("huggingfacetb/smollm2-135m-instruct") is panel.get("smollm2")
    assert panel.find("owner/name") is None
    with pytest.raises(ValueError, match="did you mean 'smollm2'"):
        panel.get("smolm2")


def test_a_wrong_entry_is_refused() -> None:
    right = {"name": "x", "hub_id": "o/x", "model_type": "llama", "layers": 2, "full_layers": 2, "q_heads": 4}
    right |= {"kv_heads": 2, "head_dim": 64, "qk_norm": False, "trained_context": 1024}
    Entry(**right)
    for wrong in ({"kv_heads": 3}, {"full_layers": 3}, {"full_layers": 0}, {"kinds": ("ful",)}):
        with pytest.raises(ValueError, match=r"heads|layers|did you mean 'full'"):
            Entry(**right | wrong)


def test_the_command_lists_all_and_tells_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    table = capsys.readouterr().out
    assert all(name in table for name in panel.names())
    assert max(map(len, table.splitlines())) <= 120
    for entry in panel.PANEL:
        assert main(["models", entry.name]) == 0
        page = capsys.readouterr().out
        assert entry.hub_id in page
        assert page.strip() == panel_text.describe(entry)
        assert max(map(len, page.splitlines())) <= 120
    assert main(["models", "gemma3"]) == 2
    assert "did you mean 'gemma-3-" in capsys.readouterr().err


def test_the_command_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [m["name"] for m in listed] == list(panel.names())
    assert main(["models", "mistral-nemo", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["tokenizer_options"] == {"fix_mistral_regex": True}
    assert one["recommended"] == "auto:budget=33"
    assert one["paper_recommends"].startswith("router-on-quest")
    assert one["policy"]["rule"]["name"] == "last-tile"
