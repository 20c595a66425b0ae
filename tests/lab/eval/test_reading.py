"""Texts without questions, against logits of whole forward passes in float64, and on the command line."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

import closecall
from closecall import cli
from closecall_lab.eval import kinds, reading, summary, text_tables
from closecall_lab.eval.matched import Applied
from closecall_lab.eval.reading import Texts, divergence, logits_of
from closecall_lab.eval.store import Store
from closecall_lab.eval.subject import Subject
from closecall_lab.tasks import encode_example

TOPK = closecall.policy("topk", budget=5, tile_factor=1)


@pytest.fixture(scope="module")
def subject(tiny: Path) -> Subject:
    return Subject.open(str(tiny))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files in the probes' words: three that make texts of 512 tokens, one of them from two short ones."""
    from closecall_lab import tasks
    from closecall_lab.probes.words import tokenizer

    directory = tmp_path_factory.mktemp("texts")
    made = list(tasks.get("probe-scattered").examples(tokenizer(), 700, 4, 0))
    for i, example in enumerate(made[:2]):
        (directory / f"{i}.txt").write_text(example.prompt)
    words = made[2].prompt.split(" ")
    (directory / "2.txt").write_text(" ".join(words[:300]))
    (directory / "3.txt").write_text(" ".join(words[300:]))
    return directory


def opened(subject: Subject, written: Path, positions: int = 0) -> Texts:
    found = kinds.parse(f"text:files={written},positions={positions}").on(subject)
    assert isinstance(found, Texts)
    return found


def test_measures_are_those_of_whole_forward_passes(subject: Subject, written: Path) -> None:
    texts = opened(subject, written)
    example = next(texts.examples(512, 0))
    run = texts.measure(example, Applied(TOPK))
    ids = torch.tensor([encode_example(subject.loaded.tokenizer, example).ids])
    model = subject.loaded.model
    with torch.no_grad():
        dense = torch.log_softmax(model(ids).logits[0].double(), -1)[:-1]
        with closecall.attach(model, TOPK):
            sparse = torch.log_softmax(model(ids).logits[0].double(), -1)[:-1]
    kl = (dense.exp() * (dense - sparse)).sum(-1)
    target = ids[0, 1:, None]
    (answer,) = run.answers
    assert answer["positions"] == 511
    assert answer["kl"] == pytest.approx(float(kl.mean()), rel=1e-3)
    assert answer["kl"] > 0.01
    assert answer["loss"] == pytest.approx(float(-sparse.gather(1, target).mean()), rel=1e-4)
    assert answer["dense_loss"] == pytest.approx(float(-dense.gather(1, target).mean()), rel=1e-4)
    assert answer["agreement"] == pytest.approx(
        float((dense.argmax(-1) == sparse.argmax(-1)).double().mean()), abs=0.005
    )
    assert run.score == answer["agreement"]
    for part, value in enumerate(answer["kl_by_part"]):
        assert value == pytest.approx(float(kl[64 * part : 64 * part + 64].mean()), rel=1e-2, abs=1e-5)
    assert answer["kl_by_part"][0] == pytest.approx(0, abs=1e-5)  # the first tiles see no more than they may keep
    assert run.prompt_tokens == 512


def test_dense_is_read_once_and_no_distance_from_itself(
    subject: Subject, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, names, plain_read = opened(subject, written), [], reading.read

    def counted(model: Any, ids: list[int], policy: closecall.Policy) -> reading.Reading:
        names.append(policy.name)
        return plain_read(model, ids, policy)

    monkeypatch.setattr(reading, "read", counted)
    example = next(texts.examples(512, 0))
    texts.measure(example, Applied(TOPK))
    run = texts.measure(example, Applied(closecall.policy("dense")))
    assert names == ["dense", "topk"]
    (answer,) = run.answers
    assert (answer["kl"], answer["agreement"], answer["correct"], run.kept_fraction) == (0, 1, True, 1)
    assert answer["loss"] == answer["dense_loss"]


def test_slices_do_not_matter(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    width = subject.loaded.model.config.hidden_size
    dense, other, ids = torch.randn(100, width), torch.randn(100, width), list(range(2, 102))
    whole = divergence(subject.loaded.model, dense, other, ids)
    monkeypatch.setattr(reading, "SLICE", 7)
    for a, b in zip(
        vars(whole).values(), vars(divergence(subject.loaded.model, dense, other, ids)).values(), strict=True
    ):
        torch.testing.assert_close(a, b)
    some = divergence(subject.loaded.model, dense, other, ids, positions=10)
    assert some.at.tolist() == [0, 11, 22, 33, 44, 54, 65, 76, 87, 98]
    torch.testing.assert_close(some.kl, whole.kl[some.at])


def test_a_head_that_is_not_known_is_refused(subject: Subject, written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = opened(subject, written)
    monkeypatch.setattr(reading, "logits_of", lambda model, hidden: 1.5 * logits_of(model, hidden))
    with pytest.raises(ValueError, match="does something to its logits that closecall does not know"):
        texts.measure(next(texts.examples(512, 0)), Applied(TOPK))


def test_texts_share_no_file_and_end_when_there_is_no_more(subject: Subject, written: Path) -> None:
    texts = list(opened(subject, written).examples(512, 0))
    assert 2 <= len(texts) <= 3
    names = [name for example in texts for name in example.meta["files"]]  # type: ignore[union-attr]
    assert len(names) == len(set(names))
    tokenizer = subject.loaded.tokenizer
    assert all(len(encode_example(tokenizer, example).ids) == 512 for example in texts)
    with pytest.raises(ValueError, match=r"have 2\d\d\d tokens, fewer than the context of 9000"):
        next(opened(subject, written).examples(9000, 0))


def test_on_the_command_line(tiny: Path, written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "results.db"
    task = f"text:files={written},positions=100"
    given = ["--model", str(tiny), "--tasks", task, "--contexts", "512", "--budgets", "5", "--n", "2"]
    given += ["--policies", "dense,topk:tile_factor=1,router:tile_factor=1", "--controls", "--store", str(store)]
    assert cli.main(["eval", *given, "--export", str(tmp_path / "texts.csv")]) == 0
    with (tmp_path / "texts.csv").open() as file:
        exported = list(csv.DictReader(file))
    assert {row["positions"] for row in exported} == {"100"}
    assert all(float(row["kl"]) >= 0 for row in exported)
    page = capsys.readouterr().out
    assert "KL" in page
    assert "loss change" in page
    assert "2 texts, 200 positions" in page
    with Store(store, create=False) as opened_store:
        (group,) = summary.groups(opened_store)
        rows: dict[str, Any] = {line["policy"]: line for line in text_tables.lines(group)}
    assert rows["dense"]["kl"].value == 0
    assert rows["dense"]["agreement"].value == 1
    assert rows["topk:tile_factor=1"]["kl"].value > rows["router:tile_factor=1"]["kl"].value > 0
