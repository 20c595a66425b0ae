"""vLLM's line of a validation: one engine in a process of its own, by turns with vLLM's attention and with ours.

Rounding differs between kernels, and a language model makes much of it: so this asks whether the next token's
log-probability is the same to a tolerance, where the other checks have bounds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from typing import Any

from ...spine.results import Facts

CASE = "vLLM: dense as vLLM's own attention, and a cached prefix as a cold one"
TOKENS, ANSWER = 4000, 8
POLICIES = ("dense", "auto:budget=8")
TOLERANCE = {"torch.float32": 1e-3}  # of a log-probability
HALF_TOLERANCE = 0.1
MARK = "CLOSECALL-VLLM "


def compare(answers: dict[str, tuple[list[int], float]], tolerance: float) -> Facts:
    """From the tokens and the first token's log-probability of every run: how far ours are off, and what is wrong."""
    plain = answers["vllm"][1]
    off = abs(answers["dense"][1] - plain)
    problems = []
    if not off <= tolerance:
        problems.append(f"dense: the first token's log-probability is {off:.3g} off vLLM's own")
    for policy in POLICIES:
        cold, cached = answers[policy], answers[f"{policy} cached"]
        if cold[0][:1] != cached[0][:1] or not abs(cold[1] - cached[1]) <= tolerance:
            problems.append(f"{policy}: cold {cold[0][0]} ({cold[1]:.3g}), cached {cached[0][0]} ({cached[1]:.3g})")
    return {"dense_off": off, "tolerance": tolerance, "problem": "; ".join(problems) or None}


def ask(llm: Any, prompt: list[int]) -> tuple[list[int], float]:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=ANSWER, temperature=0, logprobs=1, ignore_eos=True)
    said = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0]
    return list(said.token_ids), next(iter(said.logprobs[0].values())).logprob


def run_engine(model: str, gpu: bool, tokens: int) -> Facts:
    """In this process, which needs vLLM and nothing else on the device."""
    from vllm import LLM

    chosen = {"attention_backend": "CUSTOM"} if gpu else {"enforce_eager": True}
    llm = LLM(
        model, max_model_len=tokens + ANSWER + 8, max_num_seqs=4, max_num_batched_tokens=1024,
        additional_config={"closecall": {"policy": POLICIES[-1]}}, **chosen,
    )  # fmt: skip
    words, vocabulary = random.Random(0), llm.get_tokenizer().vocab_size
    prompt = [words.randrange(100, vocabulary - 100) for _ in range(tokens)]
    answers: dict[str, tuple[list[int], float]] = {}
    for policy in (None, *POLICIES):
        llm.collective_rpc("closecall_use", args=(policy,))
        llm.reset_prefix_cache()
        answers[policy or "vllm"] = ask(llm, prompt)
        answers[f"{policy} cached"] = ask(llm, prompt)
    dtype = str(llm.llm_engine.vllm_config.model_config.dtype)
    return compare(answers, TOLERANCE.get(dtype, HALF_TOLERANCE))


def require() -> None:
    """Raises where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("--vllm needs vLLM, which is not installed here: see docs/vllm.md, or leave it out")


def check(model: str, gpu: bool, tokens: int = TOKENS) -> Facts:
    """The same in a process of its own: an engine wants the device to itself."""
    call = [sys.executable, "-m", __name__, model, str(int(gpu)), str(tokens)]
    environment = os.environ | {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    done = subprocess.run(call, capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        last = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        return {"problem": f"the engine ended with code {done.returncode}: {last}"}
    found: Facts = json.loads(lines[-1][len(MARK) :])
    return found


if __name__ == "__main__":
    print(MARK + json.dumps(run_engine(sys.argv[1], sys.argv[2] == "1", int(sys.argv[3]))), flush=True)
