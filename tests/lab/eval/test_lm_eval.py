"""lm-eval on an attached model, offline: a task file and a data file made here."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import closecall
from closecall.models.cache import UnavailableError
from closecall_lab.eval import lm_eval
from closecall_lab.probes import text, words

if importlib.util.find_spec("lm_eval") is None:  # to import it takes seconds, and in one worker of the two for nothing
    pytest.skip("lm-eval is an extra: pip install './lab[lm-eval]'", allow_module_level=True)
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

TASK = """
task: closecall_local
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}} ask {{{{key}}}} ->"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
GENERATED = """
task: closecall_generated
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}} ask {{{{key}}}} ->"
doc_to_target: "{{{{choices[label]}}}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 3
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
N = 12


@pytest.fixture(scope="module")
def include(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tasks")
    rng = np.random.default_rng(0)
    rows = []
    for i in range(N):
        made = text.needles(rng, 300, 6, n_questions=6)
        values = [q.value for q in made.questions]
        label = i % 6
        rows.append({"text": made.text, "key": made.questions[label].key, "choices": values, "label": label})
    data = directory / "rows.json"
    data.write_text(json.dumps(rows))
    (directory / "local.yaml").write_text(TASK.format(data=data))
    (directory / "generated.yaml").write_text(GENERATED.format(data=data))
    return directory


@pytest.fixture(scope="module")
def subject() -> tuple[Any, Any]:
    """A random model of the probes' vocabulary, large enough in its weights that attention decides the answer."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(words.VOCABULARY),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        bos_token_id=2,
        eos_token_id=3,
        pad_token_id=0,
        initializer_range=0.5,
    )
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config).eval().requires_grad_(False)
    tokenizer = words.tokenizer()
    tokenizer.eos_token = "."
    return model, tokenizer


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def by_hand(model: Any, tokenizer: Any, include: Path) -> list[float]:
    """Whether the likeliest choice is the right one."""
    rows = json.loads((include / "rows.json").read_text())
    picked = picked_by_hand(model, tokenizer, include)
    return [float(choice == row["choices"][row["label"]]) for choice, row in zip(picked, rows, strict=True)]


def picked_by_hand(model: Any, tokenizer: Any, include: Path) -> list[str]:
    """Which choice has the likeliest continuation, the way lm-eval asks: one forward pass for each."""
    picked = []
    for row in json.loads((include / "rows.json").read_text()):
        sums = []
        for choice in row["choices"]:
            ids = torch.tensor([tokenizer(f"{row['text']} ask {row['key']} -> {choice}")["input_ids"]])
            with torch.no_grad():
                likely = model(ids).logits[0, -2].log_softmax(-1)
            sums.append(float(likely[ids[0, -1]]))
        picked.append(row["choices"][sums.index(max(sums))])
    return picked


def test_an_attached_model_is_what_lm_eval_runs(subject: tuple[Any, Any], include: Path) -> None:
    model, tokenizer = subject
    documents = lm_eval.Documents("lm-eval:closecall_local", model, tokenizer, include_path=include)
    sparse = closecall.policy("topk", budget=4, tile_factor=1, block=16, tile=16)
    outputs = {}
    for policy in (closecall.policy("dense"), sparse):
        with closecall.attach(model, policy) as handle:
            outputs[policy] = [documents.answer(i).scores["acc"] for i in range(N)]
            assert outputs[policy] == by_hand(model, tokenizer, include)
            assert any(layer["kept_fraction"] < 1 for layer in handle.stats().values()) == (policy is sparse)
    assert outputs[closecall.policy("dense")] == by_hand(model, tokenizer, include)
    assert (
        outputs[closecall.policy("dense")] != outputs[sparse]
    )  # the policy matters here: running the wrong one would show


def test_generation(subject: tuple[Any, Any], include: Path) -> None:
    documents = lm_eval.Documents("closecall_generated", *subject, include_path=include)
    answered = documents.answer(1)
    assert set(answered.scores) == {"exact_match"}
    assert answered.output.count(" ") < 4


def test_document_by_document(subject: tuple[Any, Any], include: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same answers one by one, in any order, as all at once; and nothing of lm-eval's on the screen."""
    model, tokenizer = subject
    documents = lm_eval.Documents("lm-eval:closecall_local", model, tokenizer, include_path=include)
    assert len(documents) == N
    capsys.readouterr()
    answers = {i: documents.answer(i) for i in (5, 0, 11, 1)}
    assert capsys.readouterr().err == ""
    picked, right = picked_by_hand(model, tokenizer, include), by_hand(model, tokenizer, include)
    assert {i: a.output for i, a in answers.items()} == {i: picked[i] for i in answers}
    assert {i: a.scores for i, a in answers.items()} == {i: {"acc": right[i]} for i in answers}
    row = json.loads((include / "rows.json").read_text())[5]
    asked = documents.document(5)
    assert [kind for kind, _ in asked.requests] == ["loglikelihood"] * 6
    assert [arguments for _, arguments in asked.requests] == [
        (f"{row['text']} ask {row['key']} ->", f" {choice}") for choice in row["choices"]
    ]
    assert asked.target == str(row["label"])
    assert asked.longest in {"".join(arguments) for _, arguments in asked.requests}


def test_solved_examples_do_not_depend_on_who_was_asked_before(subject: tuple[Any, Any], include: Path) -> None:
    model, tokenizer = subject
    first, second = (
        lm_eval.Documents("closecall_generated", model, tokenizer, shots=2, include_path=include) for _ in range(2)
    )
    in_order = [first.document(i) for i in range(3)]
    assert [second.document(i) for i in (2, 0, 1)] == [in_order[i] for i in (2, 0, 1)]
    assert all(asked.longest.count(" ask ") == 3 for asked in in_order)
    shown = [asked.longest.split(" ask ")[0] for asked in in_order]
    assert len(set(shown)) > 1
    assert first.document(0, seed=1) != in_order[0]


@pytest.fixture
def only_arc(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval's own index, made of one of its directories: all of them are 14,000 files, which take twenty seconds."""
    from lm_eval.tasks._index import TaskIndex

    def arc(root: Path) -> Iterator[Path]:
        return iter(sorted((root / "arc" if root.name == "tasks" else root).glob("*.yaml")))

    monkeypatch.setattr(TaskIndex, "_iter_yaml_files", staticmethod(arc))
    monkeypatch.setattr(lm_eval, "_installed", lm_eval._installed.__wrapped__)


@pytest.mark.usefixtures("only_arc")
def test_tasks_are_looked_for_in_the_users_directory_and_then_in_lm_evals(include: Path) -> None:
    assert list(lm_eval.find("closecall_local", include).task_index) == ["closecall_generated", "closecall_local"]
    assert "closecall_local" not in lm_eval.find("arc_easy", include).task_index
    assert "arc_easy" in lm_eval.find("arc_easy").task_index
    with pytest.raises(ValueError, match="'arc_eazy': did you mean 'arc_easy'"):
        lm_eval.find("arc_eazy", include)


@pytest.mark.usefixtures("only_arc")
def test_bad_input(subject: tuple[Any, Any], include: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = subject
    with pytest.raises(ValueError, match="unknown lm-eval task 'closecall_locale': did you mean 'closecall_local'"):
        lm_eval.Documents("lm-eval:closecall_locale", model, tokenizer, include_path=include)
    with pytest.raises(ValueError, match="chat=True needs a chat template"):
        lm_eval.Documents("closecall_local", model, tokenizer, chat=True)
    with pytest.raises(ValueError, match="include_path must be a directory"):
        lm_eval.Documents("closecall_local", model, tokenizer, include_path=include / "local.yaml")
    with pytest.raises(ValueError, match="this one has none: set eos_token"):
        lm_eval.Documents("closecall_local", model, words.tokenizer())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"\./lab\[lm-eval\]"):
        lm_eval.Documents("closecall_local", model, tokenizer)
