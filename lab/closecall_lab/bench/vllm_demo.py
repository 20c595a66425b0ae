"""`make vllm-demo`: the same long prompt to vLLM without and with the plugin; time to first token, and the answers."""

from __future__ import annotations

import argparse
import time
from typing import Any

from .vllm_server import Server, model_directory, serving

FILLER = (
    "The harbour town keeps its records in a long wooden shelf by the window. On the {n}th page of the book there is a "
    "note about ship number {n}, which came in with {m} barrels and left before the evening tide. "
)
NEEDLE = "The secret word of the harbour master is 'marzipan'. "
QUESTION = "What is the secret word of the harbour master? Answer with one word."


def prompt(words: int) -> str:
    """A dull book of about so many words, with one sentence worth finding in the middle."""
    pages = [FILLER.format(n=n, m=(n * 37) % 91) for n in range(1, 1 + words // len(FILLER.split()))]
    pages.insert(len(pages) // 2, NEEDLE)
    return "".join(pages) + "\n\n" + QUESTION


def ask(server: Server, model: str, text: str) -> tuple[float, int, str]:
    """Seconds to the first token, tokens of the prompt, and the answer."""
    from openai import OpenAI

    client: Any = OpenAI(base_url=server.url, api_key="none", timeout=3600)
    start = time.perf_counter()
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": text}], max_tokens=16, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    first, tokens, pieces = 0.0, 0, []
    for part in stream:
        if part.choices and part.choices[0].delta.content:
            first = first or time.perf_counter() - start
            pieces.append(part.choices[0].delta.content)
        if part.usage is not None:
            tokens = part.usage.prompt_tokens
    return first, tokens, "".join(pieces).strip()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m closecall_lab.bench.vllm_demo", description=__doc__)
    parser.add_argument("--words", type=int, default=4800, help="length of the prompt (%(default)s words)")
    parser.add_argument("--policy", default="auto", help="(%(default)s)")
    budget = "in blocks; tiles keep twice that. With 8, an eighth of this prompt, this small model loses the answer"
    parser.add_argument("--budget", type=int, default=12, help=f"{budget} (%(default)s)")
    args = parser.parse_args(argv)
    model = model_directory("smollm2")
    text = prompt(args.words)
    options = ("--dtype", "float32", "--max-model-len", "8192", "--max-num-seqs", "4", "--enforce-eager")
    settings = {"policy": args.policy, "budget": args.budget}
    answers = set()
    print(f"\nThe prompt: {len(text.split())} words, in the middle: {NEEDLE}\nIts end:    {QUESTION}\n", flush=True)
    for name, asked in (("vLLM", None), (f"vLLM + closecall {args.policy}, budget {args.budget}", settings)):
        print(f"{name}: starting the server (half a minute on a quiet machine) ...", flush=True)
        with serving(model, asked, *options) as server:
            if asked is not None and "closecall is active" not in server.text:
                raise SystemExit("the plugin is not active: is closecall installed where vLLM is?")
            first, tokens, answer = ask(server, model, text)
        print(f"  {tokens} tokens read, first token after {first:.2f} s; answer: {answer!r}", flush=True)
        answers.add(answer)
    print("\nBoth servers are stopped.")
    if len(answers) > 1:
        wider = f"python -m closecall_lab.bench.vllm_demo --budget {2 * args.budget}"
        read, there = 2 * args.budget, -(-tokens // 64)
        print(f"The answers differ. All but the last rows read {read} of up to {there} blocks; for more: {wider}")


if __name__ == "__main__":
    main()
