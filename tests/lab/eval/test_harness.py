"""lm-eval's tasks in a grid, offline: the same documents under every policy, the same store, the same tables."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import results

import closecall
from closecall import cli
from closecall_lab.eval import harness, lm_eval, runner
from closecall_lab.eval.grid import Grid
from closecall_lab.eval.harness import Harness, LmEval
from closecall_lab.eval.matched import Applied
from closecall_lab.eval.spec import Spec
from closecall_lab.eval.store import Store
from closecall_lab.eval.subject import Subject
from closecall_lab.probes import text, words

if importlib.util.find_spec("lm_eval") is None:  # to import it takes seconds, and in one worker of the two for nothing
    pytest.skip("lm-eval is an extra: pip install './lab[lm-eval]'", allow_module_level=True)
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

HEAD = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{{{{text}}}} ask {{{{key}}}} ->"
"""
CHOOSE = """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_norm
"""
WRITE = """
output_type: generate_until
doc_to_target: "{{choices[label]}}"
generation_kwargs:
  until: ["."]
  max_gen_toks: 3
metric_list:
  - metric: exact_match
"""
N, KEYS = 4, 3
BUDGET = 6
POLICIES = ("dense", "topk:block=16,tile=16,tile_factor=1", "router:block=16,tile=16,tile_factor=1")


@pytest.fixture(scope="module")
def model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, whose answers end at the full stop for lm-eval too."""
    path = tmp_path_factory.mktemp("lm_eval_model") / "tiny"
    shutil.copytree(tiny, path)
    tokenizer = words.tokenizer()
    tokenizer.eos_token = "."
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def include(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lm_eval_tasks")
    rng = np.random.default_rng(0)
    rows = []
    for i in range(N):
        made = text.needles(rng, 200 + 40 * i, 6, n_questions=KEYS)
        values = [q.value for q in made.questions]
        rows.append({"text": made.text, "key": made.questions[i % KEYS].key, "choices": values, "label": i % KEYS})
    data = directory / "rows.json"
    data.write_text(json.dumps(rows))
    for name, body in (("choose", CHOOSE), ("write", WRITE)):
        (directory / f"{name}.yaml").write_text(f"task: closecall_{name}{HEAD.format(data=data)}{body}")
    (directory / "both.yaml").write_text("group: closecall_both\ntask: [closecall_choose, closecall_write]\n")
    return directory


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))


@pytest.fixture(scope="module")
def subject(model: Path) -> Subject:
    return Subject.open(str(model))


def task_of(name: str, include: Path, **more: Any) -> LmEval:
    return LmEval(f"closecall_{name}", include=str(include), **more)


def scored_by_lm_eval(
    task: str, model: Any, tokenizer: Any, policy: closecall.Policy, include: Path
) -> dict[str, list[float]]:
    """What lm-eval itself makes of all documents in one run, by metric."""
    evaluator, _, huggingface = lm_eval._lm_eval()
    with closecall.attach(model, policy):
        results = evaluator.simple_evaluate(
            model=huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1), tasks=[task],
            task_manager=lm_eval.find(task, include), bootstrap_iters=0,
        )  # fmt: skip
    samples = sorted(results["samples"][task], key=lambda sample: int(sample["doc_id"]))
    return {metric: [float(sample[metric]) for sample in samples] for metric in samples[0]["metrics"]}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["choose", "write"])
def test_a_document_is_answered_as_lm_eval_answers_it(subject: Subject, include: Path, name: str, policy: str) -> None:
    """Score, and what was kept, against lm-eval's own run over all documents and the handle's own statistics."""
    chosen = Spec.parse(policy).policy(BUDGET)
    opened = Harness(task_of(name, include), subject)
    runs = [opened.measure(example, Applied(chosen)) for example in opened.examples(0, 0)]
    assert len(runs) == N
    model, tokenizer = subject.loaded.model, subject.loaded.tokenizer
    metric = "acc" if name == "choose" else "exact_match"
    assert [run.score for run in runs] == scored_by_lm_eval(f"closecall_{name}", model, tokenizer, chosen, include)[
        metric
    ]
    assert {run.answers[0]["metric"] for run in runs} == {metric}
    with closecall.attach(model, chosen) as handle:
        opened.documents.answer(N - 1)
        stats = handle.stats()
    if policy == "dense":
        assert {run.kept_fraction for run in runs} == {1.0}
    else:
        kept = [layer["effective_budget"] for layer in stats.values()]
        assert runs[-1].layers["effective_budget"] == pytest.approx(kept, abs=1e-4)
        assert runs[-1].effective_budget == pytest.approx(np.mean(kept))
        assert runs[-1].kept_fraction == pytest.approx(np.mean([s["kept_fraction"] for s in stats.values()]))
        triggers = chosen.rule.has_trigger()
        rates = [layer["trigger_rate"] if triggers else 0.0 for layer in stats.values()]
        assert runs[-1].layers["trigger_rate"] == pytest.approx(rates, abs=1e-6)
    json.dumps([vars(run) for run in runs], allow_nan=False)


def test_policies_do_answer_differently_here(subject: Subject, include: Path) -> None:
    """Else the tests above could run the wrong policy and nobody would see."""
    opened = Harness(task_of("write", include), subject)
    said = {}
    for policy in POLICIES[:2]:
        chosen = Spec.parse(policy).policy(BUDGET)
        said[policy] = [
            opened.measure(example, Applied(chosen)).answers[0]["output"] for example in opened.examples(0, 0)
        ]
    assert said[POLICIES[0]] != said[POLICIES[1]]


def test_passes_that_leave_nothing_out_count_with_those_that_do(subject: Subject) -> None:
    policy = Spec.parse(POLICIES[1]).policy(BUDGET)  # 6 blocks of 16 keys: all of 40 tokens, not of 200
    model = subject.loaded.model
    passes = harness.Passes(policy)
    with torch.no_grad(), closecall.attach(model, policy) as handle, passes.of(model):
        handle.watch(passes.see)
        for tokens in (40, 200):
            model(torch.arange(tokens)[None])
    assert passes.lengths == [40, 200]
    for layer in passes.layers([0, 1], heads=4):
        tiles = 3 + 13  # of 16 rows
        kept = [*range(1, 4), *(min(seen, BUDGET) for seen in range(1, 14))]  # blocks, tile by tile
        assert (layer.tiles, layer.kept) == (4 * tiles, 4 * sum(kept))
        assert layer.visible == 4 * (sum(range(1, 4)) + sum(range(1, 14)))


def test_the_same_content_is_the_same_example(subject: Subject, include: Path, tmp_path: Path) -> None:
    """Whatever the seed and the place of the task's file; and another number of shots is another one."""
    opened = Harness(task_of("choose", include), subject)
    first = [e.digest() for e in opened.examples(0, 0)]
    assert len(set(first)) == N
    assert [e.digest() for e in opened.examples(0, 1)] == first
    moved = tmp_path / "elsewhere"
    shutil.copytree(include, moved)
    assert [e.digest() for e in Harness(task_of("choose", moved), subject).examples(0, 0)] == first


def options(model: Path, include: Path, store: Path, *more: str) -> list[str]:
    named = f"lm-eval:closecall_choose,include={include}"
    given = ["--model", str(model), "--tasks", f"{named},probe-needle", "--contexts", "512", "--budgets", str(BUDGET)]
    given += ["--policies", ",".join((*POLICIES, POLICIES[2].replace("router", "router/matched")))]
    return ["eval", *given, "--n", "3", "--store", str(store), *more]


def test_the_command(
    model: Path, include: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.db"
    assert cli.main(options(model, include, path)) == 0
    page = capsys.readouterr()
    assert "its documents have their own lengths, so --contexts does not apply to it" in page.err
    flat = " ".join(page.out.split())  # titles may wrap
    assert "documents of their own lengths, on tiny: 3 examples, 3 questions" in flat
    assert "probe-needle at 512 tokens on tiny: 3 examples, 3 questions" in page.out
    assert "24/24 runs" in page.err
    assert "it/s" not in page.err  # none of lm-eval's own bars
    rows = results(path)
    mine = [(cell, run) for _, cell, run in rows if cell.task.startswith("lm-eval:")]
    assert {cell.context for cell, _ in mine} == {0}
    assert len(mine) == 3 * 4
    for number in range(3):
        assert len({run["example"] for cell, run in mine if cell.number == number}) == 1

    def fail(*_: object) -> None:
        raise AssertionError("this was measured already")

    with monkeypatch.context() as patched:  # the same again measures nothing
        patched.setattr(Harness, "measure", fail)
        assert cli.main(options(model, include, path)) == 0
    assert results(path) == rows
    assert cli.main(options(model, include, path, "--n", "9")) == 0  # there are no more than 4 documents
    assert len([row for row in results(path) if row[1].task.startswith("lm-eval:")]) == N * 4


def test_a_router_has_its_matched_control(model: Path, include: Path, tmp_path: Path) -> None:
    specs = tuple(Spec.parse(p) for p in (POLICIES[2], POLICIES[2].replace("router", "router/matched")))
    grid = Grid((str(model),), (str(task_of("choose", include)),), (512,), specs, (BUDGET,), 2)
    with Store(tmp_path / "results.db") as store:
        runner.run(grid, store, say=lambda _: None)
        spent = {(r.cell.policy, r.cell.number): r.run.effective_budget for r in store.rows()}
    assert len(spent) == 4
    for number in range(2):
        router, matched = (spent[str(s), number] for s in specs)
        assert matched == pytest.approx(router, rel=0.02)  # half a block over about 20 tiles


def test_a_prompt_that_lm_eval_cuts_is_noted(subject: Subject, include: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Harness(task_of("write", include), subject)
    monkeypatch.setattr(opened.documents.lm, "_max_length", 150)
    example = next(opened.examples(0, 0))
    run = opened.measure(example, Applied(closecall.policy("dense")))
    assert run.prompt_tokens == 150 - 3  # with room for the answer
    assert run.warnings == ["199 tokens are more than the 150 of tiny: lm-eval cut the prompt's beginning"]


def test_names_are_read_and_written() -> None:
    for name in ("lm-eval:arc_easy", "lm-eval:arc_easy,shots=5,chat=yes,metric=acc_norm,include=tasks/mine"):
        assert str(LmEval.parse(name)) == name
    assert str(LmEval.parse("lm-eval:a,include=x,shots=0")) == "lm-eval:a,shots=0,include=x"


def test_unknown_tasks_are_found_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str, include_path: object) -> None:
        raise ValueError(f"unknown lm-eval task {name!r} in {include_path}")

    monkeypatch.setattr(lm_eval, "find", nothing)
    with pytest.raises(ValueError, match="unknown lm-eval task 'arc_eas' in mine"):
        Grid(("no/such/model",), ("lm-eval:arc_eas,include=mine",), (512,), (Spec("dense"),), (5,), 1)


def test_what_cannot_be_run(subject: Subject, include: Path) -> None:
    with pytest.raises(ValueError, match="'closecall_both' is a group of 2 lm-eval tasks: name one of them"):
        Harness(task_of("both", include), subject)
    opened = Harness(task_of("choose", include, metric="acc_nrm"), subject)
    example = next(opened.examples(0, 0))
    with pytest.raises(ValueError, match=r"metric of lm-eval:closecall_choose.* 'acc_nrm': did you mean 'acc_norm'"):
        opened.measure(example, Applied(closecall.policy("dense")))
    figures = {"perplexity": 7.5}
    with pytest.raises(ValueError, match=r"perplexity of .* is 7\.5: only figures from 0 to 1 can be compared"):
        Harness(task_of("choose", include), subject)._figure(lm_eval.Answered("", figures))
    with pytest.raises(ValueError, match="has no figure for a single document"):
        Harness(task_of("choose", include), subject)._figure(lm_eval.Answered("", {"8192": -1.0}))
