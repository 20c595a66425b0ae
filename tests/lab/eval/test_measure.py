"""One run against what the attached model's own recorder wrote, transformers' generate, and plain forward passes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub.utils import are_progress_bars_disabled

import closecall
import closecall_lab.probes
from closecall.models.load import INCIDENTAL, fingerprint
from closecall_lab import tasks
from closecall_lab.eval import measure as measuring
from closecall_lab.eval.measure import measure
from closecall_lab.eval.subject import Subject
from closecall_lab.tasks import Example, Question, encode_example, gold_blocks

POLICIES = {
    "topk": closecall.policy("topk", budget=5, tile_factor=1),
    "router": closecall.policy("router", budget=5, tile_factor=1),
    "router-on-quest": closecall.policy("router-on-quest", budget=6, tile_factor=1, block=32, tile=32, q=0.2),
    "per-cell": closecall.policy("router", budget=5, tile_factor=1, trigger="per-cell"),
}
TASKS = (
    "probe-needle",
    "probe-scattered",
    "probe-chase",
    "probe-chase:generate=yes",
    "probe-chase:scattered=yes,questions=3",
    "probe-needle:questions=8",
    "probe-chase:questions=3",
)


@pytest.fixture(scope="module")
def subject(tiny: Path) -> Subject:
    return Subject.open(str(tiny))


def example_of(subject: Subject, name: str, context: int = 1024, seed: int = 0) -> tuple[Any, Example]:
    task = tasks.get(name)
    return task, next(iter(task.examples(subject.loaded.tokenizer, context, 1, seed, wrap=subject.loaded.prompt)))


def ids_of(subject: Subject, example: Example) -> torch.Tensor:
    return torch.tensor([encode_example(subject.loaded.tokenizer, example).ids])


def recorded(subject: Subject, example: Example, policy: closecall.Policy, directory: Path) -> list[dict[str, Any]]:
    """The selections of a prefill, as the public recorder writes them, in layer order."""
    with torch.no_grad(), closecall.attach(subject.loaded.model, policy) as handle:
        handle.record(directory)
        subject.loaded.model(ids_of(subject, example))
    lines = [json.loads(line) for line in (directory / "index.jsonl").read_text().splitlines()]
    assert [line["layer"] for line in lines] == [0, 1]
    return [dict(np.load(directory / line["file"])) for line in lines]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("task_name", TASKS)
def test_what_is_recorded_is_what_the_selections_say(
    subject: Subject, task_name: str, name: str, tmp_path: Path
) -> None:
    policy = POLICIES[name]
    task, example = example_of(subject, task_name)
    run = measure(subject, task, example, policy)
    layers = recorded(subject, example, policy, tmp_path / "record")
    tokens = encode_example(subject.loaded.tokenizer, example)
    assert run.prompt_tokens == len(tokens.ids)
    assert run.effective_budget == pytest.approx(np.mean([x["counts"].mean() for x in layers]))
    unions: list[list[float]] = []
    for i, found in enumerate(layers):
        margin, fired = found["margin"][0], found["triggered"][0]
        assert run.layers["trigger_rate"][i] == pytest.approx(fired.sum() / (~np.isnan(margin)).sum(), abs=1e-6)
        assert run.layers["last_triggered"][i] == fired[:, -1].mean()
        assert run.layers["effective_budget"][i] == pytest.approx(found["counts"].mean(), abs=1e-4)
        heads, any_head, asked = [], [], []
        for question in example.questions:
            # The row that predicts the answer's first token, by looking at every token's characters.
            starts = [
                t for t, (a, b) in enumerate(tokens.offsets) if question.at is not None and a >= question.at and b
            ]
            row = starts[0] - 1 if starts else len(tokens.ids) - 1
            tile = row // policy.tile
            asked.append(fired[:, tile].mean())
            for b in (b for span in gold_blocks(example, question, tokens.offsets, policy.block) for b in span):
                kept = [b in found["kv_idx"][0, h, tile, : found["counts"][0, h, tile]] for h in range(4)]
                heads.append(np.mean(kept))
                any_head.append(float(any(kept)))
        assert run.layers["asked_triggered"][i] == pytest.approx(np.mean(asked), abs=1e-4)
        assert run.layers["hit"][i] == pytest.approx(np.mean(heads), abs=1e-4)
        assert run.layers["hit_union"][i] == pytest.approx(np.mean(any_head), abs=1e-4)
        unions.append(any_head)
    if len(example.questions) == 1:
        assert run.answers[0]["hit_union"] == pytest.approx(np.mean(unions), abs=1e-4)
    json.dumps(dataclasses.asdict(run), allow_nan=False)


def test_dense_keeps_everything(subject: Subject) -> None:
    task, example = example_of(subject, "probe-chase")
    run = measure(subject, task, example, closecall.policy("dense"))
    tiles = -(-run.prompt_tokens // 64)
    assert run.effective_budget == (tiles + 1) / 2
    assert (run.kept_fraction, run.answers[0]["hit"], run.answers[0]["hit_union"]) == (1, 1, 1)
    assert run.layers["trigger_rate"] == [None, None]
    assert run.layers["hop_union"] == [[1.0, 1.0]] * 4


def test_hop_by_hop(subject: Subject, tmp_path: Path) -> None:
    policy = closecall.policy("topk", budget=4, tile_factor=1, block=16, tile=16)
    task, example = example_of(subject, "probe-chase", seed=3)
    run = measure(subject, task, example, policy)
    offsets = encode_example(subject.loaded.tokenizer, example).offsets
    spans = gold_blocks(example, example.questions[0], offsets, 16)
    for i, found in enumerate(recorded(subject, example, policy, tmp_path / "record")):
        kept = {int(b) for h in range(4) for b in found["kv_idx"][0, h, -1, : found["counts"][0, h, -1]]}
        for hop, blocks in enumerate(spans):
            assert run.layers["hop_union"][hop][i] == pytest.approx(np.mean([b in kept for b in blocks]), abs=1e-4)
    assert min(x for hop in run.layers["hop_union"] for x in hop) < 1  # else this showed nothing


@pytest.mark.parametrize("name", ["dense", "router"])
def test_generated_answers_are_those_of_generate(subject: Subject, name: str) -> None:
    policy = POLICIES.get(name, closecall.policy("dense"))
    task, example = example_of(subject, "probe-chase:generate=yes", seed=1)
    model, tokenizer = subject.loaded.model, subject.loaded.tokenizer
    ids = ids_of(subject, example)
    with torch.no_grad(), closecall.attach(model, policy):
        made = model.generate(ids, max_new_tokens=example.max_new_tokens, do_sample=False)
    said = tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
    run = measure(subject, task, example, policy)
    ended = tokenizer.decode([model.config.eos_token_id])  # generate shows the full stop that ended it
    assert run.answers[0]["output"] == said.removesuffix(ended).rstrip()


def test_an_answer_ends_at_the_full_stop(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    task, example = example_of(subject, "probe-chase:generate=yes")
    policy = closecall.policy("dense")
    whole = measure(subject, task, example, policy).answers[0]["output"].split()
    assert len(whole) > 3
    stop = subject.loaded.tokenizer.convert_tokens_to_ids(whole[2])
    monkeypatch.setattr(subject.loaded.model.generation_config, "eos_token_id", [stop])
    assert measure(subject, task, example, policy).answers[0]["output"].split() == whole[: whole.index(whole[2])]


@pytest.mark.parametrize("name", ["dense", "router"])
def test_scattered_answers_are_the_likeliest_tokens_there(subject: Subject, name: str) -> None:
    policy = POLICIES.get(name, closecall.policy("dense"))
    task, example = example_of(subject, "probe-chase:scattered=yes,questions=3")
    model, tokenizer = subject.loaded.model, subject.loaded.tokenizer
    with torch.no_grad(), closecall.attach(model, policy):
        best = model(ids_of(subject, example)).logits[0].argmax(-1)
    offsets = encode_example(tokenizer, example).offsets
    for question, answer in zip(example.questions, measure(subject, task, example, policy).answers, strict=True):
        assert question.at is not None
        end = question.at + len(question.answers[0])
        positions = [t for t, (a, b) in enumerate(offsets) if question.at <= a and b <= end and b]
        assert len(positions) > 1
        assert answer["output"] == tokenizer.decode([int(best[t - 1]) for t in positions])


class Choice:
    """Asks for one of three words."""

    name = "choice"

    def score(self, example: Example, question: Question, output: str) -> float:
        return float(output == question.answers[0])


def test_choices_are_scored_by_their_logits_too(subject: Subject) -> None:
    model, tokenizer = subject.loaded.model, subject.loaded.tokenizer
    prompt, choices = "bear -> blue . " * 60 + "ask bear", ("blue", "red", "green")
    example = Example("choice", "choice/0", 1024, prompt, (Question(("blue",)),), 3, choices=choices)
    with torch.no_grad():
        logits = model(ids_of(subject, example)).logits[0, -1]
    best = max(choices, key=lambda c: float(logits[tokenizer.convert_tokens_to_ids(c)]))
    (answer,) = measure(subject, Choice(), example, closecall.policy("dense")).answers  # type: ignore[arg-type]
    assert answer["choice"] == best
    assert answer["choice_correct"] == (best == "blue")
    assert len(answer["output"].split()) == 3
    assert answer["unformatted"] is True  # three words of filler settle on none


@pytest.mark.parametrize(("said", "unformatted"), [("The correct answer is (B)", False), ("It is hard to tell", True)])
def test_an_answer_without_a_letter_is_told_apart(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, said: str, unformatted: bool
) -> None:
    answered = measuring._Answered({}, said, "A", 0.0)
    monkeypatch.setattr(measuring, "_answer", lambda *_: answered)
    example = Example("choice", "choice/1", 1024, "ask bear", (Question(("B",)),), 3, choices=("A", "B"))
    (answer,) = measure(subject, Choice(), example, closecall.policy("dense")).answers  # type: ignore[arg-type]
    assert answer["unformatted"] is unformatted
    assert answer["choice_correct"] is False


def test_a_context_longer_than_trained_is_noted(subject: Subject) -> None:
    task, example = example_of(subject, "probe-needle", context=1100)
    run = measure(subject, task, example, POLICIES["topk"])
    assert len(run.warnings) == 1
    assert run.warnings[0] == "1100 tokens are more than the 1024 that tiny was trained for"


def test_a_prompt_too_short_for_auto_is_noted(subject: Subject) -> None:
    task, example = example_of(subject, "probe-needle", context=1000)
    assert measure(subject, task, example, closecall.policy("auto", budget=3)).warnings == []
    run = measure(subject, task, example, closecall.policy("auto", budget=16))
    assert run.warnings == [
        f"auto ran dense: the prompt has {run.prompt_tokens:,} tokens, and it begins to cut at 4,096"
    ]


def test_the_model_is_as_before_afterwards(subject: Subject) -> None:
    task, example = example_of(subject, "probe-needle")
    ids = ids_of(subject, example)
    with torch.no_grad():
        before = subject.loaded.model(ids).logits
        measure(subject, task, example, POLICIES["router"])
        assert torch.equal(subject.loaded.model(ids).logits, before)


def test_the_fingerprint_sees_every_weight_and_not_the_place(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "copy")
    here = Subject.open(str(tiny))
    assert Subject.open(str(tmp_path / "copy")).fingerprint == here.fingerprint
    assert Subject.open(str(tiny), dtype="bf16").fingerprint != here.fingerprint
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[17, 23] += 1e-6
    assert fingerprint(model, whole=True) != here.fingerprint


def test_stored_results_are_found_by_this_fingerprint(tiny: Path) -> None:
    """Any other bytes than these, and every result stored so far would be another model's."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    config = {key: value for key, value in model.config.to_dict().items() if key not in INCIDENTAL}
    parts = [json.dumps(config, sort_keys=True, default=str).encode()]
    for name, weight in sorted(model.state_dict().items()):
        parts += [f"{name} {tuple(weight.shape)} {weight.dtype}".encode(), weight.numpy().tobytes()]
    assert Subject.open(str(tiny)).fingerprint == hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize("shown", [True, False])
def test_loading_shows_no_bar_and_leaves_the_switch_alone(
    tiny: Path, capsys: pytest.CaptureFixture[str], shown: bool
) -> None:
    bars: Any = transformers.utils.logging
    before = bars.is_progress_bar_enabled()
    try:
        bars.enable_progress_bar()
        transformers.AutoModelForCausalLM.from_pretrained(tiny)
        assert "Loading weights" in capsys.readouterr().err  # it would be seen here
        if not shown:
            bars.disable_progress_bar()
        Subject.open(str(tiny))
        Subject.open("probe")
        assert capsys.readouterr().err == ""
        assert bars.is_progress_bar_enabled() is shown
        assert are_progress_bars_disabled() is not shown
    finally:
        (bars.enable_progress_bar if before else bars.disable_progress_bar)()


def test_unknown_models() -> None:
    with pytest.raises(ValueError, match="did you mean 'smollm2'"):
        Subject.open("smolm2")


def test_probes_by_name(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Subject.open(str(tiny)).loaded
    asked: list[tuple[str, int]] = []

    def load(name: str, seed: int = 0) -> tuple[Any, Any]:
        asked.append((name, seed))
        return loaded.model, loaded.tokenizer

    monkeypatch.setattr(closecall_lab.probes, "names", lambda: ("qwen2", "qwen3"))
    monkeypatch.setattr(closecall_lab.probes, "load", load)
    opened = [Subject.open(name) for name in ("probe", "probe:qwen3", "probe:qwen3:2")]
    assert asked == [("qwen2", 0), ("qwen3", 0), ("qwen3", 2)]
    assert [s.loaded.label for s in opened][2] == "closecall's qwen3-shaped probe, seed 2"
    assert opened[0].facts["context"] == 1024
    with pytest.raises(ValueError, match="unknown probe 'qwen4': did you mean 'qwen"):
        Subject.open("probe:qwen4")
    for wrong in ("probe:qwen2:x", "probe:qwen2:0:1"):
        with pytest.raises(ValueError, match="a probe is written probe:NAME or probe:NAME:SEED"):
            Subject.open(wrong)
