"""One engine in a process of its own: `python engine.py JOB` runs the job's batches and prints what came out as JSON.

A job has `closecall` (the settings, or null for plain vLLM), `llm` (arguments of `vllm.LLM`) and `batches`: lists of
prompts (lengths; equal lengths are equal prompts) with `tokens` to generate each.
"""

from __future__ import annotations

import json
import os
import random
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")


def prompt(length: int) -> list[int]:
    """Always the same words for the same length; prompts of different lengths share a beginning of 256 words."""
    shared, own = random.Random(0), random.Random(length)
    return [(shared if i < 256 else own).randrange(3, 300) for i in range(length)]


def main() -> None:
    from vllm import LLM, SamplingParams

    job = json.loads(sys.argv[1])
    extra = {"additional_config": {"closecall": job["closecall"]}} if job["closecall"] else {}
    llm = LLM(**job["llm"], dtype="float32", enforce_eager=True, max_num_seqs=8, disable_log_stats=False, **extra)
    for batch in job["batches"]:
        if batch.get("reset"):
            llm.reset_prefix_cache()
        sampling = SamplingParams(max_tokens=batch["tokens"], temperature=0, logprobs=1, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt(n)} for n in batch["prompts"]]
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        found = [
            {
                "tokens": list(a.outputs[0].token_ids),
                "logprobs": [next(iter(step.values())).logprob for step in a.outputs[0].logprobs],
                "cached": a.num_cached_tokens,
            }
            for a in answers
        ]
        print("ANSWERS " + json.dumps(found), flush=True)
    counted = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    print("PREEMPTED " + json.dumps(counted.get("vllm:num_preemptions", 0)), flush=True)
    if job["closecall"]:
        print("STATS " + json.dumps(llm.collective_rpc("closecall_stats")), flush=True)


if __name__ == "__main__":
    main()
