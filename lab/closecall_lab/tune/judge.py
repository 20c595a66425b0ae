"""Judges a policy on text that it was not fitted on: KL to dense, change in loss, agreement, blocks kept, time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from closecall import Policy, policy
from closecall.models.load import LoadedModel

from ..eval.reading import Reading, divergence, read
from ..spine.files import write
from ..spine.progress import Say
from .pieces import Piece

POSITIONS = 1024  # of a piece, evenly spread, at which predictions are compared
END = 128  # last positions of a piece, where a prompt would ask


@dataclass(frozen=True)
class Verdict:
    """Means over pieces of text. `seconds` are of the whole prefill, `dense_seconds` of our dense kernel's."""

    kl: float
    end_kl: float  # over the last END positions: what protected tiles are for
    loss_change: float
    agreement: float
    kept_blocks: float
    kept_share: float
    seconds: float
    dense_seconds: float

    @property
    def harm(self) -> float:
        """What settings are chosen by: the text as a whole and its end, where questions stand, count alike."""
        return (self.kl + self.end_kl) / 2

    @property
    def speedup(self) -> float:
        return self.dense_seconds / self.seconds


class Judge:
    """One model and the text to judge by. What `work` has is not run again, so a stopped command goes on."""

    def __init__(self, loaded: LoadedModel, pieces: Sequence[Piece], work: Path, say: Say) -> None:
        self.loaded = loaded
        self.pieces = pieces
        self.work = work
        self.say = say
        self._dense: dict[str, Reading] = {}  # final hidden states, tokens x width of each piece

    def verdict(self, candidate: Policy) -> Verdict:
        """How the policy does, averaged over the pieces."""
        each = [self._of_piece(candidate, piece) for piece in self.pieces]
        return Verdict(**{name: fmean(asdict(one)[name] for one in each) for name in asdict(each[0])})

    def _of_piece(self, candidate: Policy, piece: Piece) -> Verdict:
        key = f"{self.loaded.fingerprint} {candidate.to_json()} {piece.digest} {POSITIONS} {END}"
        path = self.work / f"judged-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        if path.exists():
            return _stored(path)
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


def _stored(path: Path) -> Verdict:
    """What was judged before. A file that someone damaged is named, not trusted."""
    try:
        return Verdict(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): delete it, and the same command judges that piece again"
        ) from error
