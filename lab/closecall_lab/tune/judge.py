"""Judges a policy on what it was not fitted on: KL to dense, change in loss, agreement, answers, blocks kept, time."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from closecall import Policy, policy
from closecall.models.load import LoadedModel

from ..eval.reading import Reading, divergence, read
from ..spine.files import write
from ..spine.progress import Say
from .pieces import Piece
from .questions import Answers, Prompt, ask

T = TypeVar("T")
POSITIONS = 1024  # of a piece, evenly spread, at which predictions are compared
END = 128  # last positions of a piece, where a prompt would ask


@dataclass(frozen=True)
class Verdict:
    """Means over pieces of text. `seconds` are of the whole prefill, `dense_seconds` of our dense kernel's.

    Of prompts with questions, if there are any: what a token of an answer that dense gives loses, in nats, how many of
    these answers stay, and how many there are.
    """

    kl: float
    end_kl: float  # over the last END positions: what protected tiles are for
    loss_change: float
    agreement: float
    kept_blocks: float
    kept_share: float
    seconds: float
    dense_seconds: float
    answer_loss: float | None = None
    answers: int = 0
    dense_answers: int = 0

    @property
    def harm(self) -> float:
        """What settings are chosen by: the text as a whole, its end, where questions stand, and answers count alike."""
        return fmean([self.kl, self.end_kl, *([] if self.answer_loss is None else [self.answer_loss])])

    @property
    def speedup(self) -> float:
        return self.dense_seconds / self.seconds


READ = [field.name for field in dataclasses.fields(Verdict) if field.default is dataclasses.MISSING]  # of text


class Judge:
    """One model and the text to judge by. What `work` has is not run again, so a stopped command goes on."""

    def __init__(self, loaded: LoadedModel, pieces: Sequence[Piece], work: Path, say: Say) -> None:
        self.loaded = loaded
        self.pieces = [piece for piece in pieces if not isinstance(piece, Prompt)]
        self.prompts = [piece for piece in pieces if isinstance(piece, Prompt)]
        self.work = work
        self.say = say
        self._dense: dict[str, Reading] = {}  # final hidden states, tokens x width of each piece

    def verdict(self, candidate: Policy) -> Verdict:
        """How the policy does, averaged over the pieces."""
        each = [self._of_piece(candidate, piece) for piece in self.pieces]
        means: dict[str, Any] = {name: fmean(asdict(one)[name] for one in each) for name in READ}
        read = Verdict(**means)
        return dataclasses.replace(read, **self._asked(candidate)) if self.prompts else read

    def _asked(self, candidate: Policy) -> dict[str, Any]:
        """What becomes of the answers that dense gives."""
        pairs = [(self._answers(candidate, one), self._answers(policy("dense"), one)) for one in self.prompts]
        kept = [own.kept(dense) for own, dense in pairs]
        lost = [own.lost(dense) for own, dense in pairs if any(dense.right)]
        return {
            "answer_loss": fmean(lost) if lost else None,
            "answers": sum(n for n, _ in kept),
            "dense_answers": sum(n for _, n in kept),
        }

    def _answers(self, candidate: Policy, prompt: Prompt) -> Answers:
        path = self._path("asked", candidate, prompt.digest, prompt.asks, prompt.places)
        if path.exists():
            return _stored(path, Answers)
        found = ask(self.loaded.model, prompt, candidate)
        write(path, json.dumps(asdict(found)) + "\n")
        self.say(f"{candidate.name}, {found.blocks:.1f} blocks a tile, {prompt.name}: {sum(found.right)} answers")
        return found

    def _path(self, kind: str, candidate: Policy, *what: Any) -> Path:
        key = json.dumps([self.loaded.fingerprint, candidate.to_json(), *what])
        return self.work / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"

    def _of_piece(self, candidate: Policy, piece: Piece) -> Verdict:
        path = self._path("judged", candidate, piece.digest, POSITIONS, END)
        if path.exists():
            return _stored(path, Verdict)
        ids = list(piece.ids)
        if piece.digest not in self._dense:
            self._dense[piece.digest] = read(self.loaded.model, ids, policy("dense"))
        dense = self._dense[piece.digest]
        sparse = read(self.loaded.model, ids, candidate)
        gaps = divergence(self.loaded.model, dense.hidden, sparse.hidden, ids, POSITIONS)
        end = divergence(self.loaded.model, dense.hidden[-END - 1 :], sparse.hidden[-END - 1 :], ids[-END - 1 :], END)
        verdict = Verdict(
            kl=float(gaps.kl.double().mean()),
            end_kl=float(end.kl.double().mean()),
            loss_change=float((gaps.loss - gaps.dense_loss).double().mean()),
            agreement=float(gaps.agree.double().mean()),
            kept_blocks=fmean(layer.kept / layer.tiles for layer in sparse.layers),
            kept_share=fmean(layer.kept / layer.visible for layer in sparse.layers),
            seconds=sparse.seconds,
            dense_seconds=dense.seconds,
        )
        write(path, json.dumps(asdict(verdict)) + "\n")
        self.say(f"{candidate.name}, {verdict.kept_blocks:.1f} blocks a tile, {piece.name}: KL {verdict.kl:.4f}")
        return verdict


def _stored(path: Path, kind: type[T]) -> T:
    """What was judged before. A file that someone damaged is named, not trusted."""
    try:
        return kind(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): delete it, and the same command judges that piece again"
        ) from error
