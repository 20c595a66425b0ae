"""Many questions for one prefill, against separate full prefills, step-by-step decoding and the public recorder."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import closecall
from closecall_lab import tasks
from closecall_lab.eval import subject as subjects
from closecall_lab.eval.asking import fork
from closecall_lab.eval.executors import Worker
from closecall_lab.eval.grid import Job
from closecall_lab.eval.matched import TOLERANCE, Applied
from closecall_lab.eval.measure import measure
from closecall_lab.eval.spec import Spec
from closecall_lab.eval.subject import Subject
from closecall_lab.tasks import Example, Question
from closecall_lab.tasks.example import encode_ask, encode_example

pytestmark = pytest.mark.usefixtures("fewer_draws")

POLICIES = {
    "dense": closecall.policy("dense"),
    "topk": closecall.policy("topk", budget=5, tile_factor=1),
    "router-on-quest": closecall.policy("router-on-quest", budget=6, tile_factor=1, block=32, tile=32, q=0.2),
    "auto": closecall.policy("auto", budget=3),
}


@pytest.fixture(scope="module")
def subject(tiny: Path) -> Subject:
    return Subject.open(str(tiny))


def shared(subject: Subject, questions: int = 3, answers: list[str] | None = None) -> tuple[Any, Example]:
    """A context in the probes' words; question i asks with the context's own words from i on."""
    (plain,) = tasks.get("probe-scattered:keys=8").examples(subject.loaded.tokenizer, 900, 1, 0)
    words = plain.prompt.split(" ")
    asked = tuple(
        Question(
            (answers[i] if answers else " ".join(words[40 * i : 40 * i + 3]),),
            gold=((0, 40), (2000 + 100 * i, 2050 + 100 * i)),
            ask=" ".join(words[101 + 50 * i : 120 + 60 * i]),
        )
        for i in range(questions)
    )
    return tasks.get("niah-single"), dataclasses.replace(plain, context=1024, questions=asked, max_new_tokens=100)


def greedy(subject: Subject, example: Example, policy: closecall.Policy, steps: int) -> list[list[int]]:
    """Every question from a deep copy of the context's cache, its answer decoded token by token."""
    model, said = subject.loaded.model, []
    asks = [encode_ask(subject.loaded.tokenizer, question).ids for question in example.questions]
    with torch.no_grad():
        with closecall.attach(model, policy) as handle:
            ids = encode_example(subject.loaded.tokenizer, example).ids
            handle.prompt_len = len(ids) + max(map(len, asks))
            cache = model(torch.tensor([ids]), use_cache=True).past_key_values
        for ask in asks:
            forked = copy.deepcopy(cache)
            with closecall.attach(model, policy, decode="sparse") as handle:
                handle.prompt_len = len(ids) + len(ask)
                out = model(torch.tensor([ask]), past_key_values=forked, use_cache=True)
            tokens = [int(out.logits[0, -1].argmax())]
            while len(tokens) < steps:
                out = model(torch.tensor([tokens[-1:]]), past_key_values=forked, use_cache=True)
                tokens.append(int(out.logits[0, -1].argmax()))
            said.append(tokens)
    return said


@pytest.mark.parametrize("name", POLICIES)
def test_what_greedy_decoding_says_is_right_and_anything_else_is_wrong(subject: Subject, name: str) -> None:
    policy, tokenizer = POLICIES[name], subject.loaded.tokenizer
    task, unanswered = shared(subject)
    said = greedy(subject, unanswered, policy, steps=4)
    words = [str(tokenizer.decode(tokens[:3])) for tokens in said]
    task, example = shared(subject, answers=words)
    run = measure(subject, task, example, policy)
    assert [a["correct"] for a in run.answers] == [True] * 3
    assert [a["output"] for a in run.answers] == [
        str(tokenizer.decode(tokens, skip_special_tokens=True)) for tokens in said
    ]
    other = next(w for w in unanswered.prompt.split(" ") if w not in " ".join(words))
    for place in range(3):
        changed = [" ".join([*w.split(" ")[:place], other, *w.split(" ")[place + 1 :]]) for w in words]
        task, wrong = shared(subject, answers=changed)
        run = measure(subject, task, wrong, policy)
        assert [a["correct"] for a in run.answers] == [False] * 3
        # Known are the words up to the first that differs, the model's own among them.
        assert [a["output"].split() for a in run.answers] == [w.split(" ")[: place + 1] for w in words]


def test_under_dense_logits_are_those_of_separate_full_prefills(subject: Subject) -> None:
    task, example = shared(subject)
    model, seen = subject.loaded.model, []
    hook = model.register_forward_hook(lambda _, args, kwargs, out: seen.append(out.logits[0]), with_kwargs=True)
    measure(subject, task, example, closecall.policy("dense"))
    hook.remove()
    context = encode_example(subject.loaded.tokenizer, example).ids
    passes = iter(seen[1:])
    for question in example.questions:
        asked = encode_ask(subject.loaded.tokenizer, question)
        with torch.no_grad():
            whole = model(torch.tensor([context + asked.ids + asked.answer])).logits[0]
        row = len(context) + len(asked.ids) - 1
        first = next(passes)
        torch.testing.assert_close(first[-1], whole[row], rtol=1e-4, atol=1e-4)
        if int(first[-1].argmax()) == asked.answer[0]:
            torch.testing.assert_close(next(passes), whole[row + 1 :], rtol=1e-4, atol=1e-4)
    assert next(passes, None) is None


@pytest.mark.parametrize("name", ["topk", "router-on-quest", "auto"])
def test_the_context_is_chosen_alone_and_each_question_on_top_of_it(
    subject: Subject, name: str, tmp_path: Path
) -> None:
    policy, model = POLICIES[name], subject.loaded.model
    task, example = shared(subject)
    run = measure(subject, task, example, policy)
    encoded = encode_example(subject.loaded.tokenizer, example)

    def recorded(directory: Path) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (directory / "index.jsonl").read_text().splitlines()]
        return [dict(np.load(directory / line["file"])) for line in lines]

    with torch.no_grad(), closecall.attach(model, policy, decode="sparse") as handle:
        handle.record(tmp_path / "context")
        asks = [encode_ask(subject.loaded.tokenizer, question).ids for question in example.questions]
        handle.prompt_len = len(encoded.ids) + max(map(len, asks))
        cache = model(torch.tensor([encoded.ids]), use_cache=True).past_key_values
        asked = []
        for i, ids in enumerate(asks):
            handle.record(tmp_path / str(i))
            handle.prompt_len = len(encoded.ids) + len(ids)
            model(torch.tensor([ids]), past_key_values=copy.deepcopy(cache))
            asked.append(recorded(tmp_path / str(i)))
    context = recorded(tmp_path / "context")
    assert run.effective_budget == pytest.approx(np.mean([layer["counts"].mean() for layer in context]))
    assert run.prompt_tokens == len(encoded.ids)
    for i, (answer, layers) in enumerate(zip(run.answers, asked, strict=True)):
        assert answer["asked_budget"] == pytest.approx(np.mean([layer["counts"].mean() for layer in layers]), abs=1e-5)
        assert answer["asked_triggered"] == pytest.approx(
            np.mean([layer["triggered"][0, :, -1].mean() for layer in layers]), abs=1e-4
        )
        blocks = [
            b for span in tasks.gold_blocks(example, example.questions[i], encoded.offsets, policy.block) for b in span
        ]
        kept = [
            np.mean(
                [
                    b in layer["kv_idx"][0, h, -1] or layer["counts"][0, h, -1] > layer["kv_idx"].shape[3]
                    for h in range(4)
                ]
            )
            for layer in layers
            for b in blocks
        ]
        assert answer["hit"] == pytest.approx(np.mean(kept), abs=1e-4)
    assert len(run.layers["hit"]) == 2


def test_the_order_of_questions_does_not_matter(subject: Subject) -> None:
    task, example = shared(subject)
    turned = dataclasses.replace(example, questions=example.questions[::-1])
    for policy in POLICIES.values():
        one, two = (measure(subject, task, e, policy) for e in (example, turned))
        assert one.answers == two.answers[::-1]


def test_a_context_too_short_for_auto_is_noted_in_the_run_and_not_said_for_every_question(tiny: Path) -> None:
    worker = Worker(str(tiny))
    _, example = shared(worker.subject)
    worker.example = lambda job: example  # type: ignore[method-assign]
    job = Job("probe-scattered:keys=8", 1024, 0, 0, ((Spec.parse("auto"), 16),))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ((run,),) = ([result.run] for result in worker.work(job))
    assert run is not None
    (note,) = run.warnings
    assert note.startswith("auto ran dense: the prompt has")
    assert not [str(w.message) for w in said if "never cut" in str(w.message)]


def test_the_matched_control_keeps_as_much_in_context_and_questions(tiny: Path) -> None:
    worker = Worker(str(tiny))
    _, example = shared(worker.subject)
    worker.example = lambda job: example  # type: ignore[method-assign]
    specs = [(Spec.parse(f"router{control}:tile_factor=1"), 5) for control in ("", "/random", "/matched")]
    job = Job("probe-scattered:keys=8", 1024, 0, 0, tuple(specs))
    router, _, control = (result.run for result in worker.work(job))
    assert router is not None
    assert control is not None
    assert control.effective_budget == pytest.approx(router.effective_budget, abs=1 / 15)  # a block over its tiles
    for a, b in zip(router.answers, control.answers, strict=True):
        assert b["asked_budget"] == pytest.approx(a["asked_budget"], rel=TOLERANCE)
    applied = Applied.from_json(control.policy)
    assert applied.asked == tuple(a["asked_budget"] for a in router.answers)
    assert Applied.from_json(router.policy) == Applied(Spec.parse("router:tile_factor=1").policy(5))
    # What is stored is enough to find it again: the same job with all of it known makes no run.
    known = {r.key: r.run for r in worker.work(job) if r.run is not None}
    from closecall_lab.eval.store import Kept

    again = dataclasses.replace(job, known={key: Kept.of(run) for key, run in known.items()})
    assert [r.run for r in worker.work(again)] == [None] * 3


def test_a_fork_leaves_the_cache_as_it_was(subject: Subject) -> None:
    model = subject.loaded.model
    with torch.no_grad():
        cache = model(torch.arange(2, 50)[None], use_cache=True).past_key_values
        before = [layer.keys.clone() for layer in cache.layers]
        branch = fork(cache)
        model(torch.arange(2, 10)[None], past_key_values=branch)
    assert branch.get_seq_length() == 56
    assert cache.get_seq_length() == 48
    assert all(torch.equal(a, layer.keys) for a, layer in zip(before, cache.layers, strict=True))


def test_a_fork_of_a_sliding_window_cache() -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Gemma3ForCausalLM(config).eval()
    context, first, second = torch.arange(2, 42)[None], torch.arange(5, 12)[None], torch.arange(20, 29)[None]
    with torch.no_grad():
        cache = model(context, use_cache=True).past_key_values
        model(first, past_key_values=fork(cache))
        out = model(second, past_key_values=fork(cache)).logits
        whole = model(torch.cat([context, second], 1)).logits[:, 40:]
    torch.testing.assert_close(out, whole, rtol=1e-4, atol=1e-5)


def test_a_question_that_does_not_fit_is_refused(subject: Subject) -> None:
    task, example = shared(subject)
    small = dataclasses.replace(example, context=905)
    with pytest.raises(ValueError, match=r"900 tokens of context and \d+ of the longest question .* than the 905"):
        measure(subject, task, small, POLICIES["topk"])


def test_too_little_memory_is_refused_before_the_prefill(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    task, example = shared(subject)
    need = subject.key_value_bytes(1000)
    assert need == 2 * 2 * 2 * 16 * 1000 * 4  # keys and values, layers, heads, width, tokens, bytes
    monkeypatch.setattr(subjects.memory, "free", lambda: 1000)
    with pytest.raises(ValueError, match=r"tokens need .* GiB for keys and values on tiny, and .* GiB are free"):
        measure(subject, task, example, POLICIES["topk"])
