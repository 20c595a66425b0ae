"""One browser for all tests of the page, and a few pages made once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from explain_pages import CONTEXT, Browser, Explain, Loaded, policies
from made_up import big_page

from closecall.hf.attach import attach
from closecall.hf.op import Call
from closecall_lab.explain.page import Explanation
from closecall_lab.explain.prompt import Prompt, from_text
from closecall_lab.explain.run import explain_prompt
from closecall_lab.probes import load, text


@pytest.fixture(scope="session")
def probe() -> Loaded:
    model, tokenizer = load("qwen2")
    return Loaded(model.requires_grad_(False), tokenizer)


@pytest.fixture(scope="session")
def needle(probe: Loaded) -> Prompt:
    """A needle in filler, and the question for it at the end."""
    passage = text.needles(np.random.default_rng(3), CONTEXT - 7, n_keys=12)
    asked = passage.questions[0]
    whole = passage.prompt_text(asked)
    entry = f"{asked.key} -> {asked.value} ."
    at = whole.index(entry)
    question = f"ask {asked.key} ->"
    return from_text(probe.tokenizer, whole, question=question, answer=asked.value, gold=[(at, at + len(entry))])


@pytest.fixture(scope="session")
def explained(probe: Loaded) -> Explain:
    def make(prompt: Prompt, *names: str, **options: Any) -> Explanation:
        given: dict[str, Any] = {"layers": None, "truth": True, "new_tokens": 3, "say": lambda text: None} | options
        return explain_prompt(probe, probe.tokenizer, prompt, policies(*names), **given)

    return make


@pytest.fixture(scope="session")
def one(explained: Explain, needle: Prompt) -> Explanation:
    return explained(needle, "router-on-quest")


@pytest.fixture(scope="session")
def two(explained: Explain, needle: Prompt) -> Explanation:
    return explained(needle, "topk", "auto")


@pytest.fixture(scope="session")
def big(one: Explanation) -> Explanation:
    return big_page(one.gathered)


@pytest.fixture(scope="session")
def calls(probe: Loaded, needle: Prompt) -> dict[int, Call]:
    """The tensors and the selection of every layer under the policy of page `one`."""
    found: dict[int, Call] = {}
    with torch.no_grad(), attach(probe.model, policies("router-on-quest")[0][1]) as handle:
        handle.tap(found.__setitem__)
        probe.model(torch.tensor([needle.ids]), logits_to_keep=1, use_cache=False)
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    started.set_script_timeout(30)
    yield Browser(started)
    started.quit()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory, one: Explanation, two: Explanation) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("pages")
    return {"one": one.save(where / "one.html"), "two": two.save(where / "two.html")}
