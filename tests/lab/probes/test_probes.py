from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from closecall_lab import probes
from closecall_lab.probes import check, shape, text, words
from closecall_lab.probes.check import EXAMS, Exam, Result

SHIPPED = [(name, seed) for name in probes.names() for seed in probes.seeds(name)]


def test_both_families_ship_with_the_same_seeds() -> None:
    assert probes.names() == tuple(sorted(shape.FAMILIES))
    assert len({probes.seeds(name) for name in probes.names()}) == 1


@pytest.mark.parametrize(("name", "seed"), SHIPPED)
def test_shape_and_size(name: str, seed: int) -> None:
    model, tokenizer = probes.load(name, seed)
    assert model.dtype == torch.float32
    assert not model.training
    assert model.config.model_type == name
    assert hasattr(model.model.layers[0].self_attn, "q_norm") == (name == "qwen3")
    assert tokenizer.get_vocab() == words.IDS
    sentence = "ask otter -> lantern -> teal ."
    ids = tokenizer(sentence)["input_ids"]
    assert ids == words.tokenizer()(sentence)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == sentence
    size = sum(path.stat().st_size for path in probes.directory(name, seed).rglob("*"))
    assert size < 3e6


@pytest.mark.parametrize(("name", "seed"), SHIPPED)
@pytest.mark.parametrize("exam", [Exam("needles", 1024, 0.98, 24, 0), Exam("pointer_chase", 1024, 0.97, 6, 3)])
def test_answers_short_contexts(name: str, seed: int, exam: Exam) -> None:
    model, _ = probes.load(name, seed)
    result = Result(exam)
    check.examine(model, result, 24, lambda: None)
    # At the accuracy wanted, 4 wrong ones of 24 have a probability below one in a thousand; guessing gets none right.
    assert result.questions == 24
    assert result.right > 20


@pytest.mark.parametrize("name", probes.names())
def test_generate_writes_what_check_sees(name: str) -> None:
    where = probes.directory(name)
    model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).train(False)
    tokenizer = AutoTokenizer.from_pretrained(where / "tokenizer")
    passage = text.pointer_chase(np.random.default_rng(1), 700, 2, n_questions=3)
    for question, seen in zip(passage.questions, check.answers(model, passage), strict=True):
        inputs = tokenizer(passage.prompt_text(question), return_tensors="pt", return_token_type_ids=False)
        assert inputs["input_ids"][0].tolist() == passage.prompt(question).tolist()
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=len(question.answer) + 1)
        assert tokenizer.decode(out[0, inputs["input_ids"].shape[1] :]) == seen
        assert text.answered(question, seen)


@pytest.mark.parametrize(("name", "seed"), SHIPPED)
def test_the_record_of_the_training_and_of_the_check(name: str, seed: int) -> None:
    where = probes.directory(name, seed)
    log = [json.loads(line) for line in (where / "log.jsonl").read_text().splitlines()]
    assert log[0]["seed"] == seed
    assert log[-1]["accuracy"] >= 0.98
    record = json.loads((where / "check.json").read_text())
    assert record["weights"] == check.fingerprint(where), "the figures are those of other weights"
    assert [(r["task"], r["length"], r["target"]) for r in record["results"]] == [
        (e.task, e.length, e.target) for e in EXAMS
    ]
    for result in record["results"]:
        assert result["right"] >= result["target"] * result["questions"]
        assert seed != 0 or result["questions"] >= 400


def test_check_counts_writes_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    short = ["qwen2", "--longest", "1024", "--out"]
    assert check.main([*short, str(whole), "-n", "40"]) == 0
    (result,) = json.loads(whole.read_text())["results"]
    assert (result["task"], result["length"], result["questions"], result["contexts"]) == ("needles", 1024, 48, 2)
    assert f"{result['right']}/48" in capsys.readouterr().out
    for n in ("1", "25"):
        assert check.main([*short, str(parts), "-n", n]) == 0
    assert parts.read_text() == whole.read_text()
    with pytest.raises(SystemExit):
        check.main(["qwen3", *short[1:], str(parts)])
    assert "results of other weights" in capsys.readouterr().err


def test_a_probe_that_knows_nothing_fails_the_check() -> None:
    model = shape.create("qwen2", 0).train(False)
    result = Result(Exam("needles", 256, 0.98, 12, 0))
    check.examine(model, result, 12, lambda: None)
    assert not result.passed
    assert result.right < 6


def test_unknown_names_and_seeds() -> None:
    with pytest.raises(ValueError, match="did you mean 'qwen3'"):
        probes.load("qwen-3")
    with pytest.raises(ValueError, match="does not ship with seed 99: known: 0"):
        probes.load("qwen2", 99)
