"""Capturing: what is on disk is what the model computed, stopped runs go on, and too much is refused beforehand."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open

from closecall_lab import tasks
from closecall_lab.eval.compare import capture as module
from closecall_lab.eval.compare.capture import Capture, CaptureError, capture
from closecall_lab.eval.subject import Subject
from closecall_lab.tasks import Question

NEEDLE = {"task_names": ("probe-needle",), "contexts": (256,), "n": 2}


def quiet(_: str) -> None:
    pass


def example_of(subject: Subject, name: str, context: int, number: int) -> Any:
    made = tasks.get(name).examples(subject.loaded.tokenizer, context, number + 1, 0, wrap=subject.loaded.prompt)
    return list(made)[number]


def spied(model: Any, ids: list[int]) -> list[tuple[torch.Tensor, ...]]:
    """Queries, keys, values and scale of every layer, by an attention function of our own, without closecall."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    found: list[tuple[torch.Tensor, ...]] = []

    def spy(layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **more: Any) -> Any:
        found.append((q.clone(), k.clone(), v.clone(), torch.tensor(more["scaling"])))
        return sdpa_attention_forward(layer, q, k, v, mask, **more)

    AttentionInterface.register("spy_for_captures", spy)
    AttentionMaskInterface.register("spy_for_captures", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("spy_for_captures")
    try:
        with torch.no_grad():
            model(torch.tensor([ids]))
    finally:
        model.set_attn_implementation(before)
    return found


def test_what_is_captured_is_what_the_model_computed(captured: Capture, subject: Subject) -> None:
    prompts = captured.prompts()
    assert [(p.task, p.number) for p in prompts] == [
        ("probe-needle", 0), ("probe-needle", 1),
        ("probe-scattered:questions=3,keys=8", 0), ("probe-scattered:questions=3,keys=8", 1),
    ]  # fmt: skip
    assert captured.fingerprint == subject.fingerprint
    for prompt in prompts:
        example = example_of(subject, prompt.task, 512, prompt.number)
        encoded = tasks.encode_example(subject.loaded.tokenizer, example)
        assert (prompt.example, prompt.tokens, prompt.layers) == (example.digest(), len(encoded.ids), (0, 1))
        assert len(prompt.asked) == len(example.questions)
        for question, asked in zip(example.questions, prompt.asked, strict=True):
            blocks = [b for span in tasks.gold_blocks(example, question, encoded.offsets, 16) for b in span]
            assert asked.blocks(16) == blocks
            row = len(encoded.ids) - 1
            if question.at is not None:
                row = tasks.answer_tokens(example, question, encoded.offsets).start - 1
            assert asked.row == row
        expected = spied(subject.loaded.model, encoded.ids)
        for number, (q, k, v, scale) in enumerate(expected):
            layer = prompt.load(number)
            assert layer.scale == pytest.approx(float(scale))
            assert layer.softcap == 0
            for mine, theirs in ((layer.q, q), (layer.k, k), (layer.v, v)):
                if number == 0:  # nothing before it but what all implementations share
                    assert torch.equal(mine, theirs)
                else:
                    assert torch.linalg.vector_norm(mine - theirs) < 1e-4 * torch.linalg.vector_norm(theirs)


KILLED = """
import os, signal, sys
from closecall_lab.eval.compare import capture as module
from closecall_lab.eval.subject import Subject
save, left = module.save_layer, [3]
def dying(*args, **kwargs):
    save(*args, **kwargs)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
module.save_layer = dying
module.capture(Subject.open(sys.argv[1]), sys.argv[2], task_names=("probe-needle",), contexts=(256,), n=2)
"""


def test_a_killed_capture_goes_on(tiny: Path, subject: Subject, tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tiny), str(tmp_path / "a")], capture_output=True)
    assert ended.returncode == -9, ended.stderr.decode()
    there = Capture.open(tmp_path / "a")
    assert [p.number for p in there.prompts()] == [0]  # the second has a layer, and is not finished
    assert len(list(there.directory.glob("*/layer*.safetensors"))) == 3
    told: list[str] = []
    assert capture(subject, tmp_path / "a", say=told.append, **NEEDLE) == 1
    assert len(told) == 1
    assert "(1/1, " in told[0]
    assert capture(subject, tmp_path / "b", say=quiet, **NEEDLE) == 2
    again = Capture.open(tmp_path / "b")
    for mine, theirs in zip(there.prompts(), again.prompts(), strict=True):
        assert mine.asked == theirs.asked
        for layer in mine.layers:
            assert torch.equal(mine.load(layer).q, theirs.load(layer).q)
            assert torch.equal(mine.load(layer).v, theirs.load(layer).v)
    assert capture(subject, tmp_path / "a", say=quiet, **NEEDLE) == 0


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_nothing_is_written_where_there_is_no_room(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = 2 * 254  # a generated answer of two tokens is part of the context
    needed = tokens * (4 + 2 + 2) * 16 * 4 * 2
    with pytest.raises(ValueError, match=r"more than the .* GiB allowed: .*--max-gb"):
        capture(subject, tmp_path / "new", most_bytes=needed - 1, say=quiet, **NEEDLE)
    monkeypatch.setattr(module, "RESERVE", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12 - needed + 1, needed - 1))
    with pytest.raises(CaptureError, match=r"the disk of .* has room for .*: make room, or take fewer"):
        capture(subject, tmp_path / "new", say=quiet, **NEEDLE)
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12 - needed, needed))
    assert capture(subject, tmp_path / "new", most_bytes=needed, say=quiet, **NEEDLE) == 2
    sizes = [f.stat().st_size for f in (tmp_path / "new").glob("*/*.safetensors")]
    assert needed < sum(sizes) < needed + 4 * 1024  # and a header for each file


def test_a_disk_that_fills_up_leaves_finished_prompts(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    save, left = safetensors.torch.save_file, [3]

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(tensors, path, metadata)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(CaptureError, match=r"No space left.*finished prompts are safe"):
        capture(subject, tmp_path, say=quiet, **NEEDLE)
    assert [p.number for p in Capture.open(tmp_path).prompts()] == [0]
    assert not list(tmp_path.glob("*/*.part"))


def test_some_layers_in_half_the_bytes(subject: Subject, tmp_path: Path) -> None:
    assert capture(subject, tmp_path, layers=[1], save_as="bf16", say=quiet, **NEEDLE | {"n": 1}) == 1
    (prompt,) = Capture.open(tmp_path).prompts()
    assert prompt.layers == (1,)
    with safe_open(next(prompt.directory.glob("*.safetensors")), framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert prompt.load(1).q.dtype == torch.float32


def test_nothing_is_asked_in_a_context_that_questions_continue(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question is not in what is captured: no row of it looks for the answer."""
    example = example_of(subject, "probe-needle", 256, 0)
    gold = example.questions[0].gold
    shared = dataclasses.replace(example, questions=(Question(("a",), gold, ask="Which?"),))
    task = SimpleNamespace(examples=lambda *_, **__: iter([shared]))
    monkeypatch.setattr(tasks, "get", lambda _: task)
    capture(subject, tmp_path / "c", say=quiet, **NEEDLE | {"n": 1})
    (prompt,) = Capture.open(tmp_path / "c").prompts()
    assert not prompt.asked


def test_one_directory_holds_one_kind_of_capture(subject: Subject, captured: Capture, tmp_path: Path) -> None:
    shutil.copytree(captured.directory, tmp_path / "copy")
    for change in ({"save_as": "bf16"}, {"layers": [0]}):
        with pytest.raises(ValueError, match="choose another directory"):
            capture(subject, tmp_path / "copy", say=quiet, **NEEDLE | change)
    manifest = json.loads((tmp_path / "copy" / "manifest.json").read_text())
    (tmp_path / "copy" / "manifest.json").write_text(json.dumps(manifest | {"fingerprint": "of another model"}))
    with pytest.raises(ValueError, match="fingerprint 'of another model'"):
        capture(subject, tmp_path / "copy", say=quiet, **NEEDLE)


def test_a_broken_file_is_named(captured: Capture, tmp_path: Path) -> None:
    shutil.copytree(captured.directory, tmp_path / "copy")
    prompt = Capture.open(tmp_path / "copy").prompts()[0]
    path = prompt.directory / "layer001.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CaptureError, match=r"layer001.safetensors cannot be read.*capture it again"):
        prompt.load(1)


def test_bad_input(subject: Subject, tmp_path: Path) -> None:
    for change, fragment in (
        ({"layers": [5]}, r"layer 5 is not there; full-attention layers are \[0, 1\]"),
        ({"layers": []}, "layers is empty"),
        ({"save_as": "fp8"}, "unknown --save-as 'fp8'"),
        ({"n": 0}, "n must be a whole number of at least 1, got 0"),
        ({"task_names": ("probe-nedle",)}, "did you mean 'probe-needle'"),
    ):
        with pytest.raises(ValueError, match=fragment):
            capture(subject, tmp_path / "none", say=quiet, **NEEDLE | change)
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="no capture in"):
        Capture.open(tmp_path / "none")
    (tmp_path / "manifest.json").write_text('{"closecall_capture": 99}')
    with pytest.raises(ValueError, match="format 1: closecall_capture is 99"):
        Capture.open(tmp_path)
