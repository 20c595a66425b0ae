"""Mass, error and hits against float64 sums over every pair of row and key, within the arithmetic's own bounds."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import closecall
import oracle
from closecall_lab.eval.compare import quality
from closecall_lab.eval.compare.capture import Asked, Capture, CapturedLayer, Prompt
from closecall_lab.eval.compare.quality import Findings, dense_of, judge, judge_all, judge_prompt
from closecall_lab.eval.spec import Spec
from compare import everything, kept_of

POLICIES = {
    "quest": closecall.policy("quest", budget=4, tile_factor=1, block=16, tile=16),
    "router": closecall.policy("router", budget=7, tile_factor=1, block=8, tile=24),
    "dense": closecall.policy("dense", block=16, tile=16),
}


def layer_of(seed: int, softcap: float) -> CapturedLayer:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, h, 150, d, generator=generator) for h, d in ((4, 24), (2, 24), (2, 10)))
    return CapturedLayer(2 * q, k, v, scale=0.3, softcap=softcap)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("name", POLICIES)
def test_against_brute_force(name: str, softcap: float) -> None:
    policy, layer = POLICIES[name], layer_of(1, softcap)
    asked = [Asked(149, ((3, 20), (100, 101), (101, 102))), Asked(80, ((40, 45), (78, 84)))]
    judged = judge(layer, policy, asked, dense_of(layer))
    kept = kept_of(closecall.select(layer.q, layer.k, policy, scale=0.3))
    plan = oracle.tiles(1, 150, 150, policy.block, policy.tile)
    tensors = (layer.q, layer.k, layer.v)
    sparse = oracle.attend(*tensors, kept, plan, 0.3, softcap)
    dense = oracle.attend(*tensors, everything(plan, 4), plan, 0.3, softcap)

    # Mass: the sum of exact probabilities over kept keys, row by row.
    logits = 0.3 * np.einsum("hmd,hnd->hmn", oracle.exact(layer.q)[0], oracle.exact(layer.k)[0].repeat(2, 0))
    logits = softcap * np.tanh(logits / softcap) if softcap else logits
    logits = np.where(np.tril(np.ones((150, 150), dtype=bool)), logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    masses, blocks = np.zeros((4, 150)), np.arange(150) // policy.block
    for h in range(4):
        for row in range(150):
            masses[h, row] = p[h, row, np.isin(blocks, kept[0, h, row // policy.tile])].sum()
    bound = np.expm1(sparse.lse_error + dense.lse_error)[0]
    assert abs(judged.mass - masses.mean()) <= (masses * bound).mean() + 1e-12

    size = np.linalg.norm(dense.out)
    error = np.linalg.norm(sparse.out - dense.out) / size
    off = (np.linalg.norm(sparse.out_error) + np.linalg.norm(dense.out_error)) / size
    assert abs(judged.error - error) <= 2 * off * (1 + error)

    hits = []
    for one in asked:
        for start, stop in one.gold:
            blocks_of_span = sorted({t // policy.block for t in range(start, stop)})
            hits += [[b in kept[0, h, one.row // policy.tile] for h in range(4)] for b in blocks_of_span]
    assert judged.hit == pytest.approx(np.mean(hits))
    assert judged.union == pytest.approx(np.mean([any(x) for x in hits]))
    assert judged.effective_budget == pytest.approx(np.mean([len(x) for x in kept.values()]))

    # Gold mass: exact probabilities of the keys of gold blocks, each once, by whether the head keeps the block.
    there = held = 0.0
    for one in asked:
        golden = {t // policy.block for start, stop in one.gold for t in range(start, stop)}
        for h, key in itertools.product(range(4), range(one.row + 1)):
            if key // policy.block in golden:
                there += p[h, one.row, key]
                held += p[h, one.row, key] * (key // policy.block in kept[0, h, one.row // policy.tile])
    # Two float64 computations of the same sum: they differ by roundings of logits and of fewer than 1000 terms.
    rounding = 1000 * 2.0**-53 * max(np.abs(logits[np.isfinite(logits)]).max(), 1) * there
    assert judged.gold_there is not None
    assert judged.gold_kept is not None
    assert abs(judged.gold_there - there) <= rounding
    assert abs(judged.gold_kept - held) <= rounding
    assert judged.gold == judged.gold_kept / judged.gold_there
    if name == "dense":
        assert (judged.hit, judged.union, judged.gold) == (1, 1, 1)
    else:
        assert 0 < judged.gold < 1
        assert judged.mass < 0.99
        assert judged.error > 0.05


def test_without_gold_there_are_no_hits() -> None:
    layer = layer_of(2, 0.0)
    found = judge(layer, POLICIES["quest"], [Asked(149, ())], dense_of(layer))
    assert (found.hit, found.union) == (None, None)
    assert (found.gold, found.gold_kept, found.gold_there) == (None, None, None)


def test_gold_that_the_row_cannot_see_has_no_mass() -> None:
    layer = layer_of(3, 0.0)
    found = judge(layer, POLICIES["quest"], [Asked(40, ((100, 120),))], dense_of(layer))
    assert (found.hit, found.gold_there, found.gold) == (0, 0, None)


VARIANTS = [
    (Spec.parse(name), budget)
    for name, budget in (("dense", 0), ("quest:tile_factor=1", 4), ("router:tile_factor=1,q=0.3", 4))
]
VARIANTS.append((Spec.parse("router/matched:tile_factor=1,q=0.3"), 4))


@pytest.fixture
def copied(captured: Capture, tmp_path: Path) -> Capture:
    shutil.copytree(captured.directory, tmp_path / "copy")
    return Capture.open(tmp_path / "copy")


def quiet(_: str) -> None:
    pass


def test_every_policy_on_every_layer_of_the_part(copied: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copied.directory / "quality.jsonl"
    told: list[str] = []
    with Findings(path) as findings:
        rows = judge_all(copied, VARIANTS, part="final", findings=findings, say=told.append)
    assert len(told) == 2
    cells = {(r.task, r.number, r.layer, r.policy, r.budget) for r in rows}
    assert len(cells) == len(rows) == 2 * 2 * 4
    assert {r.number for r in rows} == {1}
    prompts = {(p.task, p.number): p for p in copied.prompts()}
    for row in rows:
        prompt = prompts[row.task, row.number]
        layer = prompt.load(row.layer)
        spec = Spec.parse(row.policy)
        if spec.control != "matched":
            assert row.quality == judge(layer, spec.policy(row.budget, 1), prompt.asked, dense_of(layer))
        else:  # as many blocks as its router, over the prompt's layers
            router = [r.quality.effective_budget for r in rows if r.prompt == row.prompt and r.policy == str(spec.base)]
            tiles = -(-prompt.tokens // 64)
            assert row.quality.effective_budget == pytest.approx(np.mean(router), abs=0.5 / tiles)

    def refuse(*_: Any) -> CapturedLayer:
        raise AssertionError("everything is known")

    monkeypatch.setattr(Prompt, "load", refuse)
    with Findings(path) as findings:
        assert judge_all(copied, VARIANTS, part="final", findings=findings, say=quiet) == rows


def test_a_line_cut_short_is_found_again(copied: Capture) -> None:
    path = copied.directory / "quality.jsonl"
    prompt = copied.prompts()[0]
    with Findings(path) as findings:
        rows = judge_prompt(copied, prompt, VARIANTS, findings)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with Findings(path) as findings:
        assert len(findings) == len(rows) - 1
        assert judge_prompt(copied, prompt, VARIANTS, findings) == rows
    assert path.read_bytes() == whole


def test_findings_of_an_older_version_are_found_again(copied: Capture) -> None:
    """Lines without the gold mass, under the keys they had."""
    path = copied.directory / "quality.jsonl"
    prompt = copied.prompts()[0]
    old = {"key": "0" * 64, "mass": 0.5, "error": 0.5, "hit": 0.5, "union": 0.5, "effective_budget": 4.0}
    path.write_text(json.dumps(old) + "\n")
    with Findings(path) as findings:
        assert len(findings) == 0
        rows = judge_prompt(copied, prompt, VARIANTS, findings)
    with Findings(path) as findings:
        assert len(findings) == len(rows) == len(path.read_text().splitlines()) - 1
        assert judge_prompt(copied, prompt, VARIANTS, findings) == rows


def test_the_key_knows_what_is_measured(copied: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, policy = copied.prompts()[0], POLICIES["quest"]
    now = quality.key_of(copied, prompt, 0, policy)
    monkeypatch.setattr(quality, "MEASURED", quality.MEASURED - 1)
    assert quality.key_of(copied, prompt, 0, policy) != now


def test_other_captures_are_other_findings(copied: Capture) -> None:
    """The key knows the model, the type of what was saved, the example, the layer and the policy."""
    from dataclasses import replace

    from closecall_lab.eval.compare.quality import key_of

    prompt, policy = copied.prompts()[0], POLICIES["quest"]
    keys = {
        key_of(copied, prompt, 0, policy),
        key_of(copied, prompt, 1, policy),
        key_of(copied, prompt, 0, POLICIES["router"]),
        key_of(copied, replace(prompt, example="another"), 0, policy),
        key_of(replace(copied, manifest=copied.manifest | {"fingerprint": "another"}), prompt, 0, policy),
        key_of(replace(copied, manifest=copied.manifest | {"saved_as": "bf16"}), prompt, 0, policy),
    }
    assert len(keys) == 6


def test_a_part_without_prompts(copied: Capture, tmp_path: Path) -> None:
    for prompt in copied.prompts():
        if prompt.number == 1:
            shutil.rmtree(prompt.directory)
    with Findings(tmp_path / "quality.jsonl") as findings, pytest.raises(ValueError, match="no prompts of the final"):
        judge_all(copied, VARIANTS, part="final", findings=findings, say=quiet)
