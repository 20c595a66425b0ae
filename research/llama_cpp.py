"""Times llama.cpp's prefill of the same weights on this machine: what people would use instead.

`pip install xllamacpp` in an environment of its own, then

    python -m research.llama_cpp ~/.cache/closecall/qwen2.5-coder-1.5b/*.gguf --tokens 8192,16384 --threads 2

Prompts are random tokens, as those of `closecall bench prefill`: what is read does not change the time of a dense
prefill. llama.cpp's own clock is read, so loading and sampling are not in it.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from typing import Any

ORDINARY = range(100, 30_000)  # tokens that are words in every vocabulary of today


def server(gguf: Path, longest: int, threads: int) -> Any:
    """llama.cpp with one slot that holds the longest prompt, on the loopback interface."""
    import xllamacpp  # type: ignore[import-not-found,unused-ignore]

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx, params.n_parallel, params.n_gpu_layers = longest + 64, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt = False  # every round reads the whole prompt
    params.warmup = True
    params.verbosity = 0
    return xllamacpp.Server(params)


def seconds(engine: Any, tokens: int, chance: random.Random) -> float:
    """One prefill, by llama.cpp's own clock."""
    prompt = [chance.choice(ORDINARY) for _ in range(tokens)]
    answer = engine.handle_completions({"prompt": prompt, "max_tokens": 1, "n_predict": 1, "cache_prompt": False})
    timings = answer["timings"]
    if timings["prompt_n"] != tokens:
        raise RuntimeError(f"llama.cpp read {timings['prompt_n']} of {tokens} tokens: is its context long enough?")
    return float(timings["prompt_ms"]) / 1000


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m research.llama_cpp", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--tokens", default="8192", help="lengths, with commas (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args(argv)
    if not args.gguf.is_file():
        parser.error(f"there is no file {args.gguf}: `closecall get NAME` leaves one in its cache")
    lengths = [int(n) for n in args.tokens.split(",")]
    chance, engine = random.Random(0), server(args.gguf, max(lengths), args.threads)
    for tokens in lengths:
        median = statistics.median(seconds(engine, tokens, chance) for _ in range(args.rounds))
        print(
            f"{tokens} tokens: {median:.1f} s to read, {tokens / median:.0f} tokens/s, {args.threads} threads",
            flush=True,
        )


if __name__ == "__main__":
    main()
