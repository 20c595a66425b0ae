"""vLLM's attention and ours in one engine, turn by turn: attention seconds, time to first token, decoding speed.

Runs where vLLM is installed (docs/vllm.md): `python -m closecall_lab.bench.vllm_table --model smollm2 --tokens 7500`.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from closecall.policy import as_policy
from closecall.vllm.settings import DECODERS

from .vllm_server import ENVIRONMENT, model_directory

PLAIN = "vllm"  # the contender that is vLLM's own attention
DECODED = 32


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m closecall_lab.bench.vllm_table", description=__doc__)
    made.add_argument("--model", required=True, help="smollm2, qwen2.5-coder-1.5b, or a directory")
    made.add_argument("--tokens", type=int, default=7500, help="length of the prompt (%(default)s)")
    made.add_argument("--dtype", default="auto", help="float32, bfloat16, or the model's own (%(default)s)")
    made.add_argument("--chunk", type=int, default=2048, help="tokens of a step, max_num_batched_tokens (%(default)s)")
    made.add_argument("--rounds", type=int, default=3, help="turns of every contender; medians are shown (%(default)s)")
    made.add_argument(
        "--policies", nargs="+", default=[PLAIN, "dense", "auto"], metavar="POLICY",
        help="contenders: policies as `closecall` takes them, files that `closecall calibrate` wrote among them, or "
        "`vllm` for vLLM's own attention (%(default)s)",
    )  # fmt: skip
    made.add_argument(
        "--decode", choices=DECODERS, default="vllm", help="whose kernel decodes for our policies (%(default)s)"
    )
    return made


def attention_seconds(llm: Any) -> float:
    """Seconds in attention so far, of the slowest worker."""
    return max(float(s["seconds"] + s["vllm_seconds"]) for s in llm.collective_rpc("closecall_stats"))


def turn(llm: Any, contender: str, prompt: list[int]) -> dict[str, float]:
    """One cold request, one over the cached prefix, and one that decodes."""
    from vllm import SamplingParams

    llm.collective_rpc("closecall_use", args=(None if contender == PLAIN else contender,))
    llm.reset_prefix_cache()

    def seconds(tokens: int) -> float:
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return time.perf_counter() - start

    before = attention_seconds(llm)
    first = seconds(1)
    attention = attention_seconds(llm) - before
    cached = seconds(1)
    decoding = seconds(1 + DECODED) - cached
    return {"attention": attention, "first": first, "cached": cached, "decode": DECODED / max(decoding, 1e-9)}


def label(contender: str) -> str:
    """vLLM, a policy as it was written, or what a saved one is called."""
    if contender == PLAIN:
        return "vLLM"
    saved = Path(contender).suffix == ".json"
    return f"closecall, {as_policy(contender).name} ({Path(contender).name})" if saved else f"closecall, {contender}"


def table(turns: dict[str, list[dict[str, float]]]) -> str:
    """Medians as Markdown, with every contender's attention as a share of vLLM's own."""
    medians = {
        name: {key: statistics.median(t[key] for t in listed) for key in listed[0]} for name, listed in turns.items()
    }
    plain = medians.get(PLAIN)
    lines = [
        "| attention by | attention s | of vLLM's | first token s | cached prefix s | decoding tokens/s |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, m in medians.items():
        share = f"{m['attention'] / plain['attention']:.2f}" if plain and plain["attention"] else "-"
        figures = f"{m['attention']:.2f} | {share} | {m['first']:.2f} | {m['cached']:.2f} | {m['decode']:.1f}"
        lines.append(f"| {label(name)} | {figures} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    model = model_directory(args.model)
    ours = [p for p in args.policies if p != PLAIN] or ["dense"]
    llm = LLM(
        model, dtype=args.dtype, max_model_len=args.tokens + DECODED + 8, max_num_seqs=4, enforce_eager=True,
        max_num_batched_tokens=args.chunk, additional_config={"closecall": {"policy": ours[0], "decode": args.decode}},
    )  # fmt: skip
    words = random.Random(0)
    vocabulary = llm.get_tokenizer().vocab_size
    prompt = [words.randrange(100, vocabulary - 100) for _ in range(args.tokens)]
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in args.policies}
    for _ in range(args.rounds):
        for name in args.policies:
            turns[name].append(turn(llm, name, prompt))
            done, all_turns = sum(map(len, turns.values())), args.rounds * len(args.policies)
            took = ", ".join(f"{key} {value:.2f}" for key, value in turns[name][-1].items())
            print(f"{done}/{all_turns}  {label(name)}: {took}", file=sys.stderr, flush=True)
    print(f"{Path(*Path(model).parts[-2:])}, {args.tokens} tokens in steps of {args.chunk}, {args.rounds} rounds\n")
    print(table(turns))


if __name__ == "__main__":
    main()
