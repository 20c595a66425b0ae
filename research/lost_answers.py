"""Where `auto` loses SmolLM2's answers: in which tiles, and in which layers.

    python -m research.lost_answers             # how likely the right answers stay when some tiles or layers are dense
    python -m research.lost_answers --shares    # how much of the residual stream each layer's attention is

A context with 16 needles in prose is read once under each setting, and 16 questions continue it. Their rows read
everything, as `auto`'s last tile does, so all that is lost was lost while the context was read. Its tiles keep 7 blocks
each: what `auto:budget=4` leaves them at 4K.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

import closecall
from closecall.hf.layers import find_layers
from closecall.models.load import LoadedModel
from closecall.ranking import Decision, Ranked
from closecall.rules.base import RULES, Rule
from closecall.rules.topk import TopK
from closecall_lab.eval.asking import fork
from closecall_lab.eval.subject import Subject
from closecall_lab.tasks import corpora
from closecall_lab.tune.questions import Prompt, prompts
from closecall_lab.tune.stream import watched

TASK = "niah-single:questions=16,haystack=prose"
POLICY = closecall.policy("auto", budget=7, tile_factor=1)


@RULES.register("some-tiles-dense")
@dataclasses.dataclass(frozen=True)
class SomeTilesDense(Rule):
    """Decides as `rule` does, but `tiles` read everything."""

    rule: Rule = dataclasses.field(default_factory=TopK)
    tiles: tuple[int, ...] = ()

    @property
    def tile_budget(self) -> int | None:
        return self.rule.tile_budget

    def limit(self, n_blocks: int) -> int:
        return n_blocks

    def decide(self, ranked: Ranked) -> Decision:
        inner = self.rule.decide(ranked)
        whole = torch.isin(torch.arange(ranked.visible.shape[1]), torch.tensor(self.tiles))
        return dataclasses.replace(inner, counts=torch.where(whole, ranked.visible[:, None], inner.counts))


@torch.no_grad()
def likely(
    model: Any, prompt: Prompt, policy: closecall.Policy, layers: Sequence[int] | None = None
) -> list[tuple[float, bool]]:
    """Of each question: the log-probability of the right answer, and whether greedy decoding gives it."""
    with closecall.attach(model, policy, layers=layers, min_context=0) as handle:
        handle.prompt_len = len(prompt.ids) + 200  # no tile of the context is the prompt's last
        cache = model(torch.tensor([prompt.ids]), logits_to_keep=1, use_cache=True).past_key_values
    answers = []
    for question, answer in prompt.asks:
        ids = torch.tensor([[*question, *answer[:-1]]])
        logits = model(ids, past_key_values=fork(cache), logits_to_keep=len(answer)).logits[0].float().log_softmax(-1)
        right = torch.tensor(answer)
        answers.append((float(logits.gather(1, right[:, None]).sum()), bool((logits.argmax(-1) == right).all())))
    return answers


def answers(loaded: LoadedModel, context: int) -> None:
    (prompt,) = prompts(loaded, [TASK], context, 1, seed=0)
    holding = tuple(sorted({place // POLICY.tile for place in prompt.evidence}))
    last = loaded.model.config.num_hidden_layers
    settings: list[tuple[str, closecall.Policy, Sequence[int] | None]] = [
        ("dense", closecall.policy("dense"), None),
        ("auto", POLICY, None),
        ("auto, the needles' tiles dense", POLICY.replace(rule=SomeTilesDense(POLICY.rule, holding)), None),
        ("auto, the first 2 layers dense", POLICY, range(2, last)),
        ("auto, the first 10 layers dense", POLICY, range(10, last)),
    ]
    for label, policy, layers in settings:
        found = likely(loaded.model, prompt, policy, layers)
        mean = sum(value for value, _ in found) / len(found)
        print(f"{label:32} {mean:6.3f} nats an answer, {sum(right for _, right in found)} of {len(found)}", flush=True)


def shares(loaded: LoadedModel) -> None:
    _, text = next(iter(corpora.corpus("manuals").texts))
    ids = loaded.tokenizer(text[:8000], add_special_tokens=False)["input_ids"][:1024]
    with torch.no_grad(), watched(loaded.model, find_layers(loaded.model)) as found:
        loaded.model(torch.tensor([ids]), use_cache=False, logits_to_keep=1)
    for layer, share in found.items():
        print(f"layer {layer:2}: {share:.3f} of the stream")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", action="store_true")
    parser.add_argument("--context", type=int, default=4096)
    args = parser.parse_args()
    loaded = Subject.open("smollm2", dtype="fp32").loaded
    if args.shares:
        shares(loaded)
    else:
        answers(loaded, args.context)


if __name__ == "__main__":
    main()
