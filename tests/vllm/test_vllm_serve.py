"""The plugin behind `vllm serve`, through the OpenAI client: answers, metrics, and clients that go away."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import random
import time
import urllib.request

import pytest
import tiny

from closecall_lab.bench.vllm_server import HOST, free_port, serving

pytest.importorskip("vllm.v1")  # "vllm" alone would be found: this very directory
openai = pytest.importorskip("openai")

QUICK = {"VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "OMP_NUM_THREADS": "1"}
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8", "--max-num-batched-tokens", "512")


def words(n: int, seed: int = 0) -> str:
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(3, 300)}" for _ in range(n))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model, port = str(tiny.write(tmp_path_factory.mktemp("served"))), free_port()
    settings = {"policy": "auto", "budget": 2, "metrics_port": port}
    with (
        serving(model, settings, *OPTIONS, environment=QUICK) as server,
        openai.OpenAI(base_url=server.url, api_key="none", timeout=300) as client,
    ):
        yield server, client, model, port


def metrics_text(port: int) -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def metrics(port: int) -> dict[str, float]:
    lines = [line.split() for line in metrics_text(port).splitlines() if line.startswith("closecall_")]
    return {name: float(value) for name, value in lines}


def complete(served, text: str, **more):
    _, client, model, _ = served
    return client.completions.create(model=model, prompt=text, max_tokens=4, temperature=0, logprobs=1, **more)


def test_the_server_says_what_is_active(served):
    assert "closecall is active in layers 0-2: auto" in served[0].text


def test_answers_do_not_depend_on_company(served):
    text = words(1500)
    alone = complete(served, text).choices[0]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(complete, served, words(n, n)) for n in (900, 1301, 700)]
        again = complete(served, text).choices[0]
        assert all(x.result().choices[0].text for x in asked)
    assert again.text == alone.text
    assert again.logprobs.token_logprobs == pytest.approx(alone.logprobs.token_logprobs, abs=1e-4)


def test_metrics(served):
    before = metrics(served[3])
    complete(served, words(1100, 5))
    after = metrics(served[3])
    rows = after["closecall_prompt_rows_total"] - before["closecall_prompt_rows_total"]
    assert rows == 3 * 1100  # of three layers
    kept, visible = (after[f"closecall_{x}_total"] - before[f"closecall_{x}_total"] for x in ("kept", "visible"))
    assert 0 < kept < visible
    assert after["closecall_seconds_total"] > before["closecall_seconds_total"]


def running(server) -> float:
    """Requests that the engine works on or has waiting."""
    text = metrics_text(server.port)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(names))


def test_clients_that_go_away_in_mid_prompt_leave_nothing_behind(served):
    server, _, model, _ = served
    whole = complete(served, words(1500, 3)).choices[0]
    for seed in range(4):
        connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
        asked = {"model": model, "prompt": words(2000, 100 + seed), "max_tokens": 1500, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        connection.close()  # without reading an answer
    give_up = time.monotonic() + 120
    while running(server) and time.monotonic() < give_up:
        time.sleep(0.5)
    assert running(server) == 0
    again = complete(served, words(1500, 3)).choices[0]
    assert again.text == whole.text
    assert again.logprobs.token_logprobs == pytest.approx(whole.logprobs.token_logprobs, abs=1e-4)
