"""The plugin in real engines: same prompt, same logits, however it is scheduled; refusals; plain vLLM untouched.

Each engine runs in a process of its own (tests/vllm/engine.py). `make test-vllm` sets up what this needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

import closecall
from closecall_lab.bench.validate import engine as validation

pytest.importorskip("vllm.v1")  # "vllm" alone would be found: this very directory

HERE = Path(__file__).parent
AUTO = {"policy": "auto", "budget": 2}
# One process and one thread: equal work is then done in equal order, so that logits can be compared bit for bit.
ALONE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "0", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return str(tiny.write(tmp_path_factory.mktemp("tiny")))


class Outcome:
    def __init__(self, process: subprocess.CompletedProcess[str]) -> None:
        self.text = process.stdout + process.stderr
        self.failed = process.returncode != 0
        lines = [x.split("ANSWERS ", 1)[1] for x in process.stdout.splitlines() if "ANSWERS " in x]
        self.answers = [json.loads(x) for x in lines]

    def last(self, word: str):
        return json.loads([x.split(word + " ", 1)[1] for x in self.text.splitlines() if x.startswith(word + " ")][-1])


def run(closecall, batches, env=ALONE, **llm) -> Outcome:
    job = json.dumps({"closecall": closecall, "llm": llm, "batches": batches})
    call = [sys.executable, str(HERE / "engine.py"), job]
    return Outcome(subprocess.run(call, capture_output=True, text=True, env=os.environ | env, timeout=900, check=False))


def ask(*prompts: int, tokens: int = 4, reset: bool = False) -> dict:
    return {"prompts": list(prompts), "tokens": tokens, "reset": reset}


@pytest.fixture(scope="session")
def whole(model):
    """The prompt in one step, alone; then from the cache; then beside others."""
    batches = [ask(1500), ask(1500), ask(1500, 1237, 700, reset=True)]
    done = run(AUTO, batches, model=model, max_num_batched_tokens=4096)
    assert not done.failed, done.text[-3000:]
    return done


def test_one_line_says_what_is_active(whole):
    said = [line for line in whole.text.splitlines() if "closecall is active" in line]
    assert len(said) == 1
    assert "layers 0-2: auto" in said[0]
    assert "keep 4 blocks a tile" in said[0]


def test_it_is_sparse_and_counts_what_it_kept(whole):
    (totals,) = whole.last("STATS")
    assert 0.1 < totals["kept"] / totals["visible"] < 0.6
    assert totals["prompt_rows"] > 3 * 1500
    assert totals["dense_rows"] > 0


def test_a_cached_prefix_changes_no_bit(whole):
    cold, cached = whole.answers[0][0], whole.answers[1][0]
    assert cached["cached"] >= 1024
    assert cached["tokens"] == cold["tokens"]
    assert cached["logprobs"] == cold["logprobs"]


def test_neighbours_change_no_bit_of_the_prompts_logits(whole):
    alone, mixed = whole.answers[0][0], whole.answers[2][0]
    assert mixed["tokens"] == alone["tokens"]
    assert mixed["logprobs"][0] == alone["logprobs"][0]
    # While decoding, vLLM's matrix products see other batch sizes and round otherwise.
    assert mixed["logprobs"] == pytest.approx(alone["logprobs"], abs=1e-4)


@pytest.mark.parametrize("chunk", [512, 2048, 777])
def test_chunks_change_nothing(model, whole, chunk):
    done = run(AUTO, [ask(1500), ask(1500, 1237, 700, reset=True)], model=model, max_num_batched_tokens=chunk)
    assert not done.failed, done.text[-3000:]
    expected = [whole.answers[0][0], *whole.answers[2]]
    for got, want in zip([*done.answers[0], *done.answers[1]], expected, strict=True):
        assert got["tokens"] == want["tokens"]
        assert got["logprobs"] == pytest.approx(want["logprobs"], abs=1e-4)


def test_preemption_changes_nothing(model):
    prompts = (1400, 1237, 1100)
    llm = {"model": model, "max_num_batched_tokens": 512, "max_model_len": 2048}
    done = run(AUTO, [ask(*prompts, tokens=150)], num_gpu_blocks_override=28, **llm)
    calm = run(AUTO, [ask(n, tokens=150) for n in prompts], **llm)
    assert not done.failed, done.text[-3000:]
    assert done.last("PREEMPTED") > 0
    assert calm.last("PREEMPTED") == 0
    for got, (want,) in zip(done.answers[0], calm.answers, strict=True):
        assert got["tokens"] == want["tokens"]
        assert got["logprobs"] == pytest.approx(want["logprobs"], abs=1e-3)


def test_dense_equals_plain_vllm_to_rounding_and_sparse_does_not(model, whole):
    batches = [ask(1500), ask(1500, 1237, 700, reset=True)]
    plain, dense = (run(c, batches, model=model, max_num_batched_tokens=777) for c in (None, {"policy": "dense"}))
    assert not plain.failed, plain.text[-3000:]
    assert not dense.failed, dense.text[-3000:]
    assert "closecall is active" not in plain.text
    pairs = [(p, d) for a, b in zip(plain.answers, dense.answers, strict=True) for p, d in zip(a, b, strict=True)]
    for want, got in pairs:
        assert got["tokens"] == want["tokens"]
        assert got["logprobs"] == pytest.approx(want["logprobs"], abs=1e-4)
    assert whole.answers[0][0]["logprobs"] != pytest.approx(plain.answers[0][0]["logprobs"], abs=1e-3)


def test_two_tensor_parallel_ranks_select_as_one_process(model):
    policy = {"policy": "router-on-quest", "budget": 2, "trigger": "absolute", "threshold": 0.3}
    batches = [ask(1500), ask(1500, 1237, 700, reset=True)]
    two = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}
    one = run(policy, batches, model=model, max_num_batched_tokens=777)
    pair = run(policy, batches, env=two, model=model, max_num_batched_tokens=777, tensor_parallel_size=2)
    assert not one.failed, one.text[-3000:]
    assert not pair.failed, pair.text[-3000:]
    (all_of_it,), halves = one.last("STATS"), pair.last("STATS")
    assert len(halves) == 2
    assert 0 < all_of_it["triggered"] < all_of_it["cut"]
    for key in ("kept", "visible", "triggered", "cut"):
        assert sum(half[key] for half in halves) == all_of_it[key], key
    for a, b in zip(one.answers, pair.answers, strict=True):
        for want, got in zip(a, b, strict=True):
            assert got["tokens"] == want["tokens"]
            assert got["logprobs"] == pytest.approx(want["logprobs"], abs=1e-4)


def test_the_line_of_a_validation(model, monkeypatch):
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    facts = validation.check(model, gpu=False, tokens=1500)
    assert facts["problem"] is None
    assert facts["dense_off"] <= 0.1


def test_our_kernel_decodes_as_vllms_does(model, whole):
    """And the policy may come by the environment."""
    asked = json.dumps({**AUTO, "decode": "closecall"})
    done = run(None, [ask(1500)], model=model, max_num_batched_tokens=4096, env=ALONE | {"CLOSECALL_VLLM": asked})
    assert not done.failed, done.text[-3000:]
    assert "closecall is active in layers 0-2: auto" in done.text
    (got,), want = done.answers[0], whole.answers[0][0]
    assert got["tokens"] == want["tokens"]
    assert got["logprobs"][0] == want["logprobs"][0]
    assert got["logprobs"] == pytest.approx(want["logprobs"], abs=1e-4)


def test_a_policy_that_was_calibrated(model, tmp_path):
    saved = tmp_path / "policy.json"
    closecall.policy("router-on-quest", budget=3, trigger="calibrated", thresholds=(0.1, 0.3, 0.5)).save(saved)
    done = run({"policy": str(saved)}, [ask(1500)], model=model, max_num_batched_tokens=512)
    assert not done.failed, done.text[-3000:]
    (totals,) = done.last("STATS")
    assert 0 < totals["triggered"] < totals["cut"]


class TestRefusals:
    """The engine does not start, and says why."""

    @pytest.mark.parametrize(
        ("closecall", "llm", "why"),
        [
            ({"policy": "autoo"}, {}, "unknown policy 'autoo': did you mean 'auto'?"),
            ({"policy": "auto", "budget": 1}, {}, "tile budget 2 must exceed the 2 forced blocks"),
            ({"policy": "router"}, {}, "calibrate thresholds for this model with `closecall calibrate`"),
            (AUTO, {"block_size": 32}, "pages of 32 tokens do not hold whole tiles of 64"),
            (AUTO, {"max_num_batched_tokens": 64}, "leaves no room for a tile of 64 rows beside 8"),
            ({**AUTO, "layers": "7-9"}, {}, "no attention layer of this model can be sparse"),
        ],
    )
    def test_at_start(self, model, closecall, llm, why):
        done = run(closecall, [], model=model, **({"max_num_batched_tokens": 512} | llm))
        assert done.failed
        assert "closecall for vLLM: " in done.text
        assert why in done.text

    def test_a_policy_of_another_model(self, model, tmp_path):
        saved = tmp_path / "policy.json"
        closecall.policy("router-on-quest", budget=3, trigger="calibrated", thresholds=(0.1, 0.3)).save(saved)
        done = run({"policy": str(saved)}, [], model=model, max_num_batched_tokens=512)
        assert done.failed
        assert "closecall for vLLM: calibrated for 2 layers (0 to 1), and this is layer 2" in done.text

    def test_a_model_of_sliding_windows(self, tmp_path):
        done = run(AUTO, [], model=str(tiny.write(tmp_path, sliding_window=256)), max_num_batched_tokens=512)
        assert done.failed
        assert "layers 0-2 stay vLLM's: a sliding window of 256" in done.text
