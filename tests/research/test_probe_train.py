from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from closecall_lab.probes import shape
from closecall_lab.probes.words import ARROW, IDS
from research.probes import train
from research.probes.train import Run, Stage, StuckError, Training

SMALL = (("hidden_size", 16), ("intermediate_size", 16), ("num_hidden_layers", 2), ("head_dim", 16))
# Two short stages that pass whatever happens, then the last one.
EASY = Training(
    stages=(Stage(32, 2, 0.0, 50, active=8), Stage(48, 2, 0.0, 50, active=8), Stage(64, 1, 0.0, 12, active=8)),
    window=7, warmup=4, checkpoint_every=5, changes=SMALL,
)  # fmt: skip


def quiet(line: str) -> None:
    pass


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def events(directory: Path) -> list[dict[str, object]]:
    """The log without what the clock says."""
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


KILLING = f"""
import os, signal, sys
from pathlib import Path
import torch
from research.probes import train
from research.probes.train import Training, Stage
torch.set_num_threads(1)

def die(name, directory, when):
    run = train.Run(name, 3, directory, {EASY!r})
    step = run._step
    def dying():
        if run.progress.step == when:
            os.kill(os.getpid(), signal.SIGKILL)
        return step()
    run._step = dying
    run.finish(lambda line: None)

for name in sys.argv[2:]:
    for when in (12, 19):
        directory = Path(sys.argv[1]) / name
        child = os.fork()  # torch has computed nothing here yet
        if not child:
            try:
                die(name, directory, when)
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (name, when, status)
        assert not (directory / "model.safetensors").exists(), (name, when)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of every family, killed without a chance to clean up two steps after a checkpoint; and again later.

    One process imports everything once, and each run is a fork of it.
    """
    directory = tmp_path_factory.mktemp("killed")
    call = [sys.executable, "-c", KILLING, str(directory), *sorted(shape.FAMILIES)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return directory


@pytest.mark.parametrize("name", sorted(shape.FAMILIES))
def test_killed_and_resumed_equals_uninterrupted(name: str, killed: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    expected = Run(name, 3, whole, EASY).finish(quiet).state_dict()
    resumed = Run(name, 3, killed / name, EASY)
    assert resumed.progress.step == 15
    reached = resumed.finish(quiet).state_dict()
    assert all(torch.equal(reached[key], value) for key, value in expected.items())
    assert weights(killed / name) == weights(whole)
    assert events(killed / name) == events(whole)


def test_other_seed_other_weights(tmp_path: Path) -> None:
    for seed in (1, 2):
        Run("qwen2", seed, tmp_path / str(seed), EASY).finish(quiet)
    assert weights(tmp_path / "1") != weights(tmp_path / "2")


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    first = Run("qwen2", 0, tmp_path, EASY)
    first.finish(quiet)
    again = Run("qwen2", 0, tmp_path, EASY)
    again.finish(lambda line: pytest.fail(line))
    assert again.progress.step == first.progress.step


def test_a_stuck_seed_is_retried_and_recorded(tmp_path: Path) -> None:
    hopeless = Training(stages=(Stage(32, 1, 1.01, 8, active=8), *EASY.stages[1:]), window=2, changes=SMALL)
    said: list[str] = []
    with pytest.raises(StuckError, match="seed 3005 stuck at"):
        Run("qwen2", 5, tmp_path, hopeless).finish(said.append)
    log = events(tmp_path)
    assert [line["seed"] for line in log if "event" in line] == [5, 1005, 2005, 3005]
    assert "next attempt from seed 1005" in str(next(line["event"] for line in log if "event" in line))
    assert any("next attempt from seed 1005" in line for line in said)
    # A retry is what a fresh run from that seed is.
    fresh = shape.create("qwen2", 1005, **dict(SMALL)).state_dict()
    run = Run("qwen2", 5, tmp_path / "again", hopeless)
    run._retry(0.0, quiet)
    assert all(torch.equal(value, fresh[key]) for key, value in run.model.state_dict().items())


def test_a_checkpoint_of_another_training_is_refused(tmp_path: Path) -> None:
    Run("qwen2", 0, tmp_path, EASY).finish(quiet)
    with pytest.raises(ValueError, match="belongs to another training"):
        Run("qwen2", 1, tmp_path, EASY)
    with pytest.raises(ValueError, match="another plan"):
        Run("qwen2", 0, tmp_path)


def test_a_step_is_drawn_from_seed_and_number_alone() -> None:
    stage = train.PLAN.stages[1]
    one, two, other = train.draw(stage, 0, 7), train.draw(stage, 0, 7), train.draw(stage, 0, 8)
    assert torch.equal(one.ids, two.ids)
    assert torch.equal(one.positions, two.positions)
    assert not torch.equal(one.ids, other.ids)


@pytest.mark.parametrize("stage", train.PLAN.stages, ids=lambda s: f"{s.length}")
def test_what_is_to_be_predicted(stage: Stage) -> None:
    batch = train.draw(stage, 0, 0)
    assert batch.ids.shape == (stage.sequences, stage.length)
    flat = batch.ids.flatten()
    # Every look-up follows an arrow, and no other token that is predicted does.
    follows_arrow = flat[batch.rows - 1] == IDS[ARROW]
    assert torch.equal(follows_arrow, batch.is_lookup)


def test_positions_jump_at_sentence_borders_only_and_reach_far() -> None:
    stage = train.PLAN.stages[2]
    longest = 0
    for step in range(20):
        batch = train.draw(stage, 0, step)
        jumps = batch.positions.diff(dim=1)
        assert int(jumps.min()) >= 1
        assert int(batch.positions[:, 0].abs().max()) == 0
        # No jump inside an entry or an answer: next to an arrow, positions are neighbours.
        arrows = batch.ids == IDS[ARROW]
        assert torch.all(jumps[arrows[:, 1:]] == 1)
        assert torch.all(jumps[arrows[:, :-1]] == 1)
        longest = max(longest, int(batch.positions.max()))
    assert 32_768 < longest < shape.POSITIONS


@pytest.mark.parametrize("name", sorted(shape.FAMILIES))
def test_a_jump_is_no_border_to_attention(name: str) -> None:
    # transformers takes restarting or jumping positions for packed sequences, unless told otherwise.
    model = shape.create(name, 0, **dict(SMALL)).train(False)
    batch = train.draw(Stage(64, 1, 0.0, 1, active=8), 0, 0)
    jump = int((batch.positions[0].diff() > 1).nonzero()[0])
    assert jump < int(batch.rows[-1]) - 1
    changed = batch.ids.clone()
    changed[0, 1 : jump + 1] = IDS["river"]
    with torch.no_grad():
        before, *_ = train.forward(
            model, train.Batch(batch.ids, batch.positions, batch.rows[-1:], batch.is_lookup[-1:])
        )
        after, *_ = train.forward(model, train.Batch(changed, batch.positions, batch.rows[-1:], batch.is_lookup[-1:]))
    assert before != after


@pytest.mark.parametrize("name", sorted(shape.FAMILIES))
def test_the_first_layer_starts_by_looking_back(name: str) -> None:
    model = shape.create(name, 0, attn_implementation="eager").train(False)
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(6, 900, size=(1, 700)))
    with torch.no_grad():
        attention = model(input_ids=ids, output_attentions=True).attentions[0][0]
    for head, back in enumerate(shape.LOOK_BACK):
        at_distance = attention[head].diagonal(-back)
        assert at_distance.median() > 0.8, (head, back)


@pytest.mark.parametrize("name", sorted(shape.FAMILIES))
def test_creating_leaves_the_random_state_alone(name: str) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one = shape.create(name, 4)
    assert torch.equal(torch.rand(3), expected)
    two = shape.create(name, 4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert sum(p.numel() for p in one.parameters()) < 0.73e6


def test_an_unknown_probe_has_a_near_match() -> None:
    with pytest.raises(ValueError, match="did you mean 'qwen3'"):
        shape.config("qwen-3")
