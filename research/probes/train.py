"""Trains the probes: `python -m research.probes.train qwen2 --seed 0 --out DIR`.

Everything that happens in a step depends on the seed and the number of the step only, never on the clock: each step
draws its text from a generator of its own, and the state on disk is all there is. So a run that was killed goes on from
its last checkpoint to the very weights it would have reached, on the same machine and number of threads.

Stages of growing length follow one another as soon as the accuracy of the last steps passes the stage's gate. A stage
that has not passed it after its steps means that the seed is stuck; the next attempt starts from seed + 1000, and the
log says so.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from closecall_lab.probes import TOKENIZER, shape, text
from closecall_lab.probes.words import tokenizer
from closecall_lab.spine import files

from .optim import Optimizers

RETRY = 1000  # added to the seed for each new attempt
ATTEMPTS = 4


@dataclass(frozen=True)
class Stage:
    """So many sequences of so many tokens a step, until `gate` is reached; `active` limits keys and values."""

    length: int
    sequences: int
    gate: float
    steps: int  # give up after these; in the last stage: exactly these, the learning rates falling to zero
    active: int | None = None


@dataclass(frozen=True)
class Training:
    """A whole training."""

    stages: tuple[Stage, ...] = (
        Stage(64, 64, gate=0.90, steps=600, active=16),
        Stage(192, 20, gate=0.90, steps=600, active=64),
        Stage(384, 10, gate=0.95, steps=600),
        Stage(1024, 4, gate=0.98, steps=400),
        Stage(2048, 2, gate=0.98, steps=300),
        Stage(4096, 1, gate=0.98, steps=300),
        Stage(4096, 1, gate=0.98, steps=60),
    )
    window: int = 10  # the gate looks at the accuracy over this many steps
    warmup: int = 20
    checkpoint_every: int = 25
    changes: tuple[tuple[str, Any], ...] = ()  # to the shape, for small trials


PLAN = Training()


@dataclass
class Progress:
    """Where a run is. With the weights and the optimisers' state, all there is to know."""

    seed: int  # of this attempt
    stage: int = 0
    step: int = 0
    step_in_stage: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of the processor, for the log alone
    recent: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Batch:
    ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor  # flat index of each token that is to be predicted
    is_lookup: torch.Tensor  # which of them take a look-up


class StuckError(RuntimeError):
    """No attempt got past its plateau."""


def draw(stage: Stage, seed: int, step: int) -> Batch:
    """The text of one step."""
    rng = np.random.default_rng([seed, step])
    ids, positions, rows, lookups = [], [], [], []
    for number in range(stage.sequences):
        sequence = _sequence(rng, stage)
        ids.append(sequence.ids)
        positions.append(_jumping(rng, sequence))
        for question in sequence.questions:
            first, end = question.position, question.position + len(question.answer) + 1  # and the full stop
            rows.append(np.arange(first, end) + number * stage.length)
            lookups.append(np.isin(np.arange(first, end), question.looked_up))
    return Batch(
        torch.from_numpy(np.stack(ids)),
        torch.from_numpy(np.stack(positions)),
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(np.concatenate(lookups)),
    )


def _sequence(rng: np.random.Generator, stage: Stage) -> text.Passage:
    """Chains of 0 to 3 pointers, every one asked somewhere after its last entry; sometimes few, sometimes many."""
    most = min(text.capacity(stage.active), int(0.85 * stage.length / 9))
    entries = int(math.exp(rng.uniform(math.log(max(3, most / 8)), math.log(most + 1))))
    room = stage.length - 1
    chains: list[int] = []
    while entries > 0:
        hops = min(entries - 1, int(rng.integers(0, 4)) if rng.random() < 0.5 else 0)
        room -= text.chain_cost(hops)
        if room < 0:
            break
        chains.append(hops)
        entries -= hops + 1
    return text.passage(rng, stage.length, chains, n_questions=len(chains), where="scattered", active=stage.active)


def _jumping(rng: np.random.Generator, sequence: text.Passage) -> np.ndarray:
    """Positions that jump ahead at sentence borders, as if there were more text between, up to the longest context."""
    length = len(sequence.ids)
    slack = rng.random() * (shape.POSITIONS - length)
    steps = np.ones(length)
    share = rng.exponential(size=len(sequence.borders)) * (rng.random(len(sequence.borders)) < rng.random())
    if share.sum() > 0:
        steps[sequence.borders] += np.floor(share / share.sum() * slack)
    steps[0] = 0
    return np.cumsum(steps).astype(np.int64)


def forward(model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, and the numbers of look-ups and of right ones among them."""
    with torch.autocast("cpu", torch.bfloat16):
        # A mask given as a dict is taken as it is; otherwise transformers would see packed sequences in the jumps.
        hidden = model.model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            attention_mask={"full_attention": None},
            use_cache=False,
        ).last_hidden_state
        logits = model.lm_head(hidden.flatten(0, 1)[batch.rows - 1])
    wanted = batch.ids.flatten()[batch.rows]
    loss = torch.nn.functional.cross_entropy(logits.float(), wanted)
    right = (logits.argmax(-1) == wanted)[batch.is_lookup]
    return loss, right.sum(), batch.is_lookup.sum()


class Run:
    """One training in one directory: `log.jsonl`, `checkpoint.pt`, and at the end the model."""

    def __init__(self, name: str, seed: int, directory: Path, plan: Training = PLAN) -> None:
        self.name, self.first_seed, self.directory, self.plan = name, seed, directory, plan
        directory.mkdir(parents=True, exist_ok=True)
        self.checkpoint = directory / "checkpoint.pt"
        self.log = directory / "log.jsonl"
        self._begin(seed)
        if self.checkpoint.exists():
            self._resume()
        else:
            self.log.write_text("")

    def _begin(self, seed: int) -> None:
        self.progress = Progress(seed)
        self.model: PreTrainedModel = shape.create(self.name, seed, **dict(self.plan.changes)).train()
        self.optimizers = Optimizers(self.model)

    def _about(self) -> dict[str, Any]:
        """What a checkpoint must agree on with the command that wants to go on from it."""
        return {"name": self.name, "seed": self.first_seed, "plan": repr(self.plan)}

    def _save(self) -> None:
        state = {
            "about": self._about(),
            "progress": vars(self.progress),
            "log_bytes": self.log.stat().st_size,
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state(),
        }
        with files.draft(self.checkpoint) as part, part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        if state["about"] != self._about():
            was = state["about"]
            raise ValueError(
                f"{self.checkpoint} belongs to another training ({was['name']}, seed {was['seed']}"
                f"{', another plan' if was['plan'] != repr(self.plan) else ''}): choose another --out, or remove it"
            )
        self.progress = Progress(**state["progress"])
        self.model.load_state_dict(state["model"])
        self.optimizers.load(state["optimizers"])
        os.truncate(self.log, state["log_bytes"])  # what came after will come again

    def _write(self, **facts: Any) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def finish(self, say: Callable[[str], None] = print) -> PreTrainedModel:
        """Trains to the end, from wherever the run is, and saves the model beside the log."""
        while self.progress.stage < len(self.plan.stages):
            before = time.process_time()
            loss, accuracy = self._step()
            self.progress.seconds += time.process_time() - before
            self._after(loss, accuracy, say)
        self.model.train(False)
        save(self.model, self.directory)
        return self.model

    def _step(self) -> tuple[float, float]:
        progress, stage = self.progress, self.plan.stages[self.progress.stage]
        batch = draw(stage, progress.seed, progress.step)
        loss, right, asked = forward(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        scale = min(1.0, (progress.step + 1) / self.plan.warmup)
        if progress.stage == len(self.plan.stages) - 1:
            scale *= 1 - progress.step_in_stage / stage.steps
        self.optimizers.step(scale)
        progress.step += 1
        progress.step_in_stage += 1
        progress.tokens += batch.ids.numel()
        accuracy = int(right) / int(asked)
        progress.recent = [*progress.recent, accuracy][-self.plan.window :]
        return loss.item(), accuracy

    def _after(self, loss: float, accuracy: float, say: Callable[[str], None]) -> None:
        """Logs, moves on to the next stage or attempt, keeps a checkpoint."""
        progress, plan = self.progress, self.plan
        stage = plan.stages[progress.stage]
        last = progress.stage == len(plan.stages) - 1
        mean = sum(progress.recent) / len(progress.recent)
        passed = len(progress.recent) == plan.window and mean >= stage.gate
        done = progress.step_in_stage >= stage.steps
        facts = {
            "seed": progress.seed,
            "step": progress.step,
            "stage": progress.stage,
            "length": stage.length,
            "tokens": progress.tokens,
            "loss": round(loss, 4),
            "accuracy": round(mean, 4),
            "seconds": round(progress.seconds, 1),
        }
        moves = done if last else passed or done
        if progress.step % plan.checkpoint_every == 0 or moves:
            self._write(**facts)
            say(
                f"{self.name} seed {progress.seed}  step {progress.step:5}  "
                f"stage {progress.stage + 1}/{len(plan.stages)} ({stage.length} tokens)  "
                f"loss {loss:.3f}  accuracy {mean:.3f}  {progress.seconds / 60:.1f} CPU min"
            )
        if moves:
            if passed:
                progress.stage += 1
                progress.step_in_stage = 0
                progress.recent = []
            else:
                self._retry(mean, say)
        if progress.step % plan.checkpoint_every == 0 or moves:
            self._save()

    def _retry(self, accuracy: float, say: Callable[[str], None]) -> None:
        progress = self.progress
        stage = self.plan.stages[progress.stage]
        event = f"stuck at {accuracy:.3f} after {progress.step_in_stage} steps of {stage.length} tokens"
        seed = progress.seed + RETRY
        if seed > self.first_seed + RETRY * (ATTEMPTS - 1):
            self._write(seed=progress.seed, event=f"{event}; gave up")
            raise StuckError(
                f"{self.name}: seed {progress.seed} {event}, after {ATTEMPTS} attempts. Try another --seed"
            )
        self._write(seed=progress.seed, event=f"{event}; next attempt from seed {seed}")
        say(f"{self.name} seed {progress.seed} {event}: next attempt from seed {seed}")
        seconds, tokens = progress.seconds, progress.tokens
        self._begin(seed)
        self.progress = replace(self.progress, seconds=seconds, tokens=tokens)


def save(model: PreTrainedModel, directory: Path) -> None:
    """In float16, which halves the size, with the tokenizer: as `load` and `from_pretrained` want it."""
    half: PreTrainedModel = copy.deepcopy(model).to(dtype=torch.float16)  # type: ignore[call-arg]
    half.config.dtype = torch.float16
    half.generation_config.do_sample = False
    half.save_pretrained(directory)
    tokenizer().save_pretrained(directory / TOKENIZER)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m research.probes.train", description=__doc__.split("\n\n")[0])
    parser.add_argument("name", choices=sorted(shape.FAMILIES), help="which probe")
    parser.add_argument("--seed", type=int, default=0, help="of the first attempt (0)")
    parser.add_argument("--out", type=Path, help="directory; goes on from the checkpoint in it (out/probes/NAME-SEED)")
    given = parser.parse_args(arguments)
    out = given.out or Path("out/probes") / f"{given.name}-{given.seed}"
    try:
        Run(given.name, given.seed, out).finish(lambda line: print(line, flush=True))
    except (StuckError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"saved in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
