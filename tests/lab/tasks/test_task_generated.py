"""Every task that makes its examples up: what stands in them, where, and how long they are."""

from __future__ import annotations

import ast
import random
import re
from pathlib import Path
from typing import Any

import pytest

from closecall_lab import tasks
from closecall_lab.tasks import code, encode_example, gold_blocks
from closecall_lab.tasks.base import Generated
from closecall_lab.tasks.example import Example, encode_ask
from closecall_lab.tasks.fit import Room

NEEDLES = [
    "niah-single",
    "niah-single:haystack=prose",
    "niah-single:haystack=needles",
    "niah-multikey",
    "niah-multikey:keys=4,haystack=prose",
    "niah-multikey:haystack=needles",
    "niah-multivalue",
    "niah-multivalue:values=2,haystack=needles",
    "niah-multiquery:queries=3",
    "variable-tracking",
    "variable-tracking:hops=2,chains=3,haystack=needles",
    "pointer-chase",
    "pointer-chase:hops=2,distractors=6,haystack=prose",
    "pointer-chase:haystack=needles,aloud=yes",
]
SHARED = [  # many questions, each a continuation of one context
    "niah-single:questions=8,haystack=code",
    "niah-single:questions=8",
    "niah-multikey:keys=16,questions=8,haystack=manuals",
    "niah-multikey:keys=4,questions=4,haystack=licences",
    "variable-tracking:hops=1,chains=8,questions=8",
    "pointer-chase:hops=1,distractors=9,haystack=docstrings,questions=8",
    "code-function",
    "code-function:bare=yes",
    "code-constant",
    "code-caller:questions=12",
]
COUNTS = ["common-words:common=5,repeats=8,others=2", "frequent-words", "frequent-words:frequent=8"]
PROBES = [
    "probe-needle",
    "probe-needle:questions=8",
    "probe-scattered",
    "probe-scattered:questions=40,keys=40",
    "probe-chase",
    "probe-chase:questions=6",
    "probe-chase:hops=2,chains=4,questions=2",
    "probe-chase:generate=yes",
    "probe-chase:hops=2,chains=4,scattered=yes,questions=4",
]
CONTEXTS = (1536, 4096)
BLOCK = 64


def some(name: str, tokenizer: Any, context: int, n: int = 2, seed: int = 0) -> list[Example]:
    return list(tasks.get(name).examples(tokenizer, context, n, seed))


def golds(example: Example) -> list[str]:
    return [example.prompt[start:end] for question in example.questions for start, end in question.gold]


def check_length(example: Example, tokenizer: Any, slack: int) -> None:
    """Prompt and answer together fill the context: never past it, and short of it by less than one word or so."""
    tokens = len(encode_example(tokenizer, example).ids)
    assert example.meta["prompt_tokens"] == tokens
    gap = example.context - tokens - example.max_new_tokens
    assert 0 <= gap <= slack
    assert gap <= 0.01 * example.context


def check_blocks(example: Example, tokenizer: Any) -> None:
    """Gold blocks against two oracles: which token each character is in, and what the blocks' tokens say."""
    encoded = encode_example(tokenizer, example)
    for question in example.questions:
        found = gold_blocks(example, question, encoded.offsets, BLOCK)
        assert len(found) == len(question.gold)
        for (start, end), blocks in zip(question.gold, found, strict=True):
            holders = {i // BLOCK for i, (a, b) in enumerate(encoded.offsets) if a < end and start < b}
            assert blocks == sorted(holders)
            text = tokenizer.decode(encoded.ids[blocks[0] * BLOCK : (blocks[-1] + 1) * BLOCK])
            assert example.prompt[start:end] in text


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", NEEDLES)
def test_lengths_and_blocks_of_needles(name: str, context: int, tokenizer: Any) -> None:
    for example in some(name, tokenizer, context):
        check_length(example, tokenizer, slack=0)
        check_blocks(example, tokenizer)


@pytest.mark.parametrize("name", SHARED)
def test_one_context_and_many_questions_that_continue_it(name: str, tokenizer: Any) -> None:
    for example in some(name, tokenizer, 4096, n=1):
        # A piece of code is filled up with a comment, whose first word is two tokens; template tails fit the rest.
        check_length(example, tokenizer, slack=6)
        check_blocks(example, tokenizer)
        assert example.shared
        assert len(example.questions) == int(*re.findall(r"questions=(\d+)", name) or ["8"])
        assert len({q.ask for q in example.questions}) == len(example.questions)
        for question in example.questions:
            (answer,) = question.answers
            assert not re.search(rf"\b{re.escape(answer)}\b", question.ask)
            assert question.gold
            assert answer in "".join(example.prompt[a:b] for a, b in question.gold)
            asked = encode_ask(tokenizer, question)
            assert tokenizer.decode(asked.answer).strip() == answer
            assert example.meta["prompt_tokens"] + len(asked.ids) + len(asked.answer) <= example.context
        # The prompt is what comes before the first question in the prompt that asks it at its end.
        whole = Room(tokenizer).prompt("CONTEXT QUESTION", "LEAD")[0]
        assert example.prompt.startswith(whole[: whole.index("CONTEXT")])
        end = whole[whole.index("QUESTION") + 8 : whole.index("LEAD")]
        assert all(end in q.ask for q in example.questions)


@pytest.mark.parametrize("name", SHARED)
def test_a_shared_context_is_the_same_again(name: str, plain: Any) -> None:
    two = some(name, plain, 4096, n=2)
    assert [e.digest() for e in some(name, plain, 4096, n=2)] == [e.digest() for e in two]
    assert two[0].prompt != two[1].prompt
    assert {e.task for e in two} == {name}


def test_code_questions_have_one_answer_in_the_file(plain: Any) -> None:
    """By reading the file with Python's own parser."""
    (example,) = some("code-caller", plain, 8192, n=1)
    tree = ast.parse(example.prompt.split("```python\n")[1].split("```")[0])
    for question in example.questions:
        callee = re.findall(r"calls `(\w+)`", question.ask)[0]
        callers = {
            f.name
            for f in tree.body
            if isinstance(f, ast.FunctionDef)
            for call in ast.walk(f)
            if isinstance(call, ast.Call) and callee in (getattr(call.func, "id", ""), getattr(call.func, "attr", ""))
        }
        assert callers == set(question.answers)
    (example,) = some("code-constant", plain, 8192, n=1)
    values = [
        (node.targets[0].id, ast.literal_eval(node.value))  # type: ignore[attr-defined]
        for node in ast.parse(example.prompt.split("```python\n")[1].split("```")[0]).body
        if isinstance(node, ast.Assign)
    ]
    assert len(values) == 16
    for question in example.questions:
        name = re.findall(r"`(\w+)` set to", question.ask)[0]
        assert [v for n, v in values if n == name] == [ast.literal_eval(question.answers[0])]
    (example,) = some("code-function:bare=yes", plain, 8192, n=1)
    assert not any(re.findall(r"does this: (.*)\?", q.ask)[0] in example.prompt for q in example.questions)
    names = re.findall(r"^def (\w+)", example.prompt, re.MULTILINE)
    assert len(names) == len(set(names)) > 20
    assert {q.answers[0] for q in example.questions} <= set(names)


def test_a_function_inside_another_calls_for_itself() -> None:
    source = (
        "def outer():\n    def inner():\n        deep()\n    class Kept:\n        found = high()\n    near(far())\n"
    )
    made = code._function(ast.parse(source).body[0], source.split("\n"))  # type: ignore[arg-type]
    assert made.calls == {"near", "far"}


def test_no_description_fits_two_functions_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(name: str, summary: str) -> code.Function:
        return code.Function(name, f"def {name}(): ...", summary, f"def {name}(): ...", frozenset())

    alike = [one(f"twin{i}", "Give back what was put in before") for i in range(3)]
    apart = [one(f"other{i}", f"Do the thing that has the number {i}") for i in range(5)]
    monkeypatch.setattr(code, "functions", lambda: tuple(alike + apart))
    for seed in range(20):
        _, asks, more = code.CodeFunction(questions=4, bare=True).draw(random.Random(seed))
        said = [ask.answers[0] for ask in asks] + re.findall(r"def (\w+)", "".join(more))
        assert len(said) == len(set(said))
        asked = [name for name in said[:4] if name.startswith("twin")]
        assert len(asked) <= 1
        assert len([name for name in said if name.startswith("twin")]) == (1 if asked else 3)


def test_a_context_too_small_for_its_questions_names_both(plain: Any) -> None:
    with pytest.raises(ValueError, match=r"at least \d+ tokens, \d+ of them for the longest question .*, got 100"):
        some("niah-multikey:keys=8,questions=8", plain, 100, n=1)
    with pytest.raises(ValueError, match="9 questions need as many keys, and there are 4"):
        tasks.get("niah-multikey:keys=4,questions=9")


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", COUNTS)
def test_lengths_and_blocks_of_lists(name: str, context: int, tokenizer: Any) -> None:
    for example in some(name, tokenizer, context):
        check_length(example, tokenizer, slack=14)  # one more item of the list: its number, and six letters
        check_blocks(example, tokenizer)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", PROBES)
def test_lengths_and_blocks_of_probes(name: str, context: int, probe: Any) -> None:
    for example in some(name, probe, context):
        check_length(example, probe, slack=0)
        check_blocks(example, probe)


def test_longer_prompts_fit_as_well(plain: Any) -> None:
    for name in ("niah-multikey:haystack=prose", "pointer-chase:haystack=needles"):
        (example,) = some(name, plain, 16384, n=1)
        check_length(example, plain, slack=0)


@pytest.mark.parametrize("name", [*NEEDLES, *COUNTS, *PROBES])
def test_the_same_again_and_none_depends_on_how_many(name: str, plain: Any, probe: Any) -> None:
    tokenizer = probe if name in PROBES else plain
    three = some(name, tokenizer, 1536, n=3)
    assert some(name, tokenizer, 1536, n=3) == three
    assert some(name, tokenizer, 1536, n=1) == three[:1]
    assert [e.digest() for e in some(name, tokenizer, 1536, n=2)] == [e.digest() for e in three[:2]]
    assert len({e.prompt for e in three}) == 3
    assert some(name, tokenizer, 1536, n=1, seed=1)[0].prompt != three[0].prompt
    assert [e.key for e in three] == [f"{name}/1536/seed0/{i}" for i in range(3)]
    assert {e.task for e in three} == {name}


def test_the_key_does_not_depend_on_the_tokenizer(plain: Any, chat: Any) -> None:
    (a,), (b,) = some("niah-single", plain, 1536, n=1), some("niah-single", chat, 1536, n=1)
    assert a.key == b.key
    assert a.digest() != b.digest()
    assert golds(a) == golds(b)


@pytest.mark.parametrize("name", [n for n in NEEDLES if n.startswith("niah")])
def test_needles_say_the_answer_and_nothing_else_does(name: str, tokenizer: Any) -> None:
    for example in some(name, tokenizer, 2048):
        (question,) = example.questions
        assert len(question.gold) == len(question.answers)
        keys = set()
        for text, answer in zip(golds(example), question.answers, strict=True):
            found = re.fullmatch(r"The special number of (\S+) is (\d{7})\.", text)
            assert found
            assert found[2] == answer
            assert example.prompt.count(answer) == 1
            keys.add(found[1])
        asked = example.prompt[max(end for _, end in question.gold) :]
        said = re.findall(r"The special number of (\S+) is (\d+)\.", example.prompt)
        for key in keys:
            assert key in asked
            assert sum(k == key for k, _ in said) == len(question.answers) // len(keys)
        assert len({v for _, v in said}) == len(said)
        if "haystack=needles" in name:
            assert len(said) > 20
        else:
            assert len(said) == max(tasks.get(name).counts()[2] + 1, len(question.answers))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [n for n in NEEDLES if n.startswith("variable")])
def test_a_variable_is_tracked_by_running_the_text(name: str, tokenizer: Any) -> None:
    for example in some(name, tokenizer, 2048):
        (question,) = example.questions
        held: dict[str, str] = {}
        for variable, pointer, source in re.findall(r"Variable (\w+) is set to (variable )?(\w+)\.", example.prompt):
            held[variable] = held[source] if pointer else source  # in the text's own order, as a reader would
        asked = re.search(r"hold the value (\d+)", example.prompt)
        assert asked
        assert {v for v, value in held.items() if value == asked[1]} == set(question.answers)
        assert [re.findall(r"[A-Z]{5}", text)[0] for text in golds(example)] == list(question.answers)
        assert list(question.gold) == sorted(question.gold)
        assert len(set(held.values())) >= tasks.get(name).chains  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [n for n in NEEDLES if n.startswith("pointer")])
def test_a_chase_ends_at_the_answer(name: str, tokenizer: Any) -> None:
    task: Any = tasks.get(name)
    for example in some(name, tokenizer, 2048):
        (question,) = example.questions
        filed = dict(re.findall(r"Entry (\w+): (continue at entry \w+|the recorded value is \w+)\.", example.prompt))
        here = re.search(r"Start at entry (\w+)", example.prompt)[1]  # type: ignore[index]
        visited = []
        while True:
            visited.append(f"Entry {here}: {filed[here]}.")
            if filed[here].startswith("the recorded"):
                break
            here = filed[here].split()[-1]
        assert visited == golds(example)
        assert len(visited) == task.hops + 1
        assert question.answers == (filed[here].split()[-1],)
        assert example.prompt.count(question.answers[0]) == 1
        ends = [text for text in filed.values() if text.startswith("the recorded")]
        assert len(set(ends)) == len(ends) >= task.distractors + 1 - ("needles" in name)


@pytest.mark.parametrize("name", COUNTS)
def test_the_words_asked_for_are_the_most_frequent(name: str, tokenizer: Any) -> None:
    for example in some(name, tokenizer, 2048):
        (question,) = example.questions
        (text,) = golds(example)
        words = re.findall(r"[a-z]+", text)
        counts = {word: words.count(word) for word in set(words)}
        ranked = sorted(counts.values(), reverse=True)
        top = len(question.answers)
        assert ranked[top - 1] > ranked[top]
        assert {w for w, c in counts.items() if c >= ranked[top - 1]} == set(question.answers)


def test_frequent_words_come_in_order_of_rank(plain: Any) -> None:
    (example,) = some("frequent-words", plain, 4096, n=1)
    counts = example.meta["counts"]
    assert isinstance(counts, list)
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == 3


@pytest.mark.parametrize("name", PROBES)
def test_a_probes_question_is_answered_by_following_the_text(name: str, probe: Any) -> None:
    for example in some(name, probe, 1536):
        filed = {}
        for sentence in example.prompt.split(" . "):
            words = sentence.split()
            if len(words) == 3 and words[1] == "->":
                filed[words[0]] = words[2]
        for question in example.questions:
            here, entries = question.answers[0].split()[0], []
            first = example.prompt[question.gold[0][0] :].split()[0]
            way, at = [], first
            while at in filed:
                entries.append(f"{at} -> {filed[at]} .")
                at = filed[at]
                way.append(at)
            assert [example.prompt[s:e] for s, e in question.gold] == entries
            if question.at is None:
                assert example.prompt.endswith(f"ask {first} ->")
                assert question.answers == (way[-1],)
                assert here == way[-1]
            else:
                assert question.answers == (" -> ".join(way),)
                assert example.prompt[: question.at].endswith(f"ask {first} -> ")
                assert example.prompt.startswith(question.answers[0], question.at)
                assert max(end for _, end in question.gold) < question.at


ASKED = {
    "probe-needle:questions=8": (8, 1),
    "probe-chase:questions=6": (6, 4),
    "probe-chase:hops=2,questions=2": (2, 3),
}


@pytest.mark.parametrize("name", ASKED)
def test_questions_in_a_row_are_all_at_the_end_and_of_different_keys(name: str, probe: Any) -> None:
    asked, looked_up = ASKED[name]
    for example in some(name, probe, 1536):
        answers = [q.answers[0] for q in example.questions]
        golds = [example.prompt[slice(*q.gold[0])].split()[0] for q in example.questions]
        assert len(set(golds)) == asked
        rows = [f"ask {key} -> {answer} ." for key, answer in zip(golds, answers, strict=True)]
        assert example.prompt.endswith(rows[-1])
        # One in every 64 tokens, in order, and none elsewhere: each in a tile of its own.
        at = [len(example.prompt.partition(row)[0].split()) for row in rows]
        assert at == [at[-1] - 64 * (asked - 1 - i) for i in range(asked)]
        assert example.prompt.split().count("ask") == asked
        assert all(len(answer.split(" -> ")) == looked_up for answer in answers)
        # Nothing is generated: the prompt alone fills the context.
        assert example.max_new_tokens == 0
        assert len(encode_example(probe, example).ids) == 1536


# Stored results are found by these: a change here orphans every run of the task that anyone has stored.
DIGESTS = {
    "probe-needle": "4bc34f71bbaf86d38ccdb87314e6a7a7af44c72b5dd08778ae362aa2e0a124ff",
    "probe-scattered": "0bc7758613a55aced219e178453f802e5bb5a394f35db3adb6443a815af80c31",
    "probe-chase": "1abb1d761c3f77e8d35561e2e218d037c236eb37f7cf266f5bee0ee2d732a1cf",
    "probe-chase:generate=yes": "9c012c67ade82b5e734996c472be94db147fcfe12d29cfeed084c02b2e5182cd",
    "probe-chase:scattered=yes,questions=2": "d9bb7fda8282fdcd44bc388b5f10f974dd18412ef252f8fecabe6f15b51633b9",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_an_example_keeps_its_address(name: str, probe: Any) -> None:
    (example,) = some(name, probe, 1536, n=1)
    assert example.digest() == DIGESTS[name]


def test_probe_prompts_are_all_known_words(probe: Any) -> None:
    (example,) = some("probe-chase", probe, 1536, n=1)
    ids = encode_example(probe, example).ids
    assert probe.unk_token_id not in ids
    assert ids[0] == probe.bos_token_id


def test_probe_scores(probe: Any) -> None:
    task = tasks.get("probe-chase:generate=yes")
    (example,) = some("probe-chase:generate=yes", probe, 1536, n=1)
    (question,) = example.questions
    value = question.answers[0]
    assert task.score(example, question, f"otter -> lamp -> {value} . the old") == 1
    assert task.score(example, question, f"{value} -> lamp .") == 0
    assert task.score(example, question, "") == 0
    scattered = tasks.get("probe-scattered")
    (example,) = some("probe-scattered", probe, 1536, n=1)
    question = example.questions[0]
    assert scattered.score(example, question, f" {question.answers[0]} ") == 1
    assert scattered.score(example, question, f"{question.answers[0]} .") == 0


def test_needles_reach_all_depths(plain: Any) -> None:
    places = [
        example.questions[0].gold[0][0] / len(example.prompt) for example in some("niah-single", plain, 1536, n=40)
    ]
    assert min(places) < 0.25
    assert max(places) > 0.75


def test_scores_are_shares_of_the_answers(plain: Any) -> None:
    task = tasks.get("niah-multivalue")
    (example,) = some("niah-multivalue", plain, 1536, n=1)
    (question,) = example.questions
    assert task.score(example, question, ", ".join(question.answers)) == 1
    assert task.score(example, question, f"{question.answers[2]} and {question.answers[0]}") == 0.5
    assert task.score(example, question, f"1{question.answers[0]}") == 0


def test_chat_is_the_default_where_there_is_a_template(chat: Any) -> None:
    (wrapped,) = some("niah-single", chat, 1536, n=1)
    assert wrapped.templated
    assert wrapped.prompt.startswith("<|user|>\n")
    assert re.search(r"<\|assistant\|>\nThe special number of \S+ is$", wrapped.prompt)
    assert encode_example(chat, wrapped).ids[0] != chat.bos_token_id  # the template's business, and this one has none
    (bare,) = some("niah-single:chat=no", chat, 1536, n=1)
    assert not bare.templated
    assert "<|user|>" not in bare.prompt
    assert encode_example(chat, bare).ids[0] == chat.bos_token_id
    check_length(bare, chat, slack=0)


def test_a_wrap_of_ones_own(plain: Any) -> None:
    def wrap(question: str, *, multiple_choice: bool = False) -> str:
        return f"Human: {question}\nModel: "

    (example,) = tasks.get("niah-single").examples(plain, 1536, 1, 0, wrap=wrap)
    assert example.prompt.startswith("Human: The text below")
    check_length(example, plain, slack=0)
    check_blocks(example, plain)
    (bare,) = tasks.get("niah-single").examples(
        plain, 1536, 1, 0, wrap=lambda question, multiple_choice=False: question
    )
    assert bare == some("niah-single", plain, 1536, n=1)[0]


def test_a_wrap_that_rewrites_the_question_is_refused(plain: Any) -> None:
    with pytest.raises(ValueError, match="does not repeat a question as it is"):
        next(tasks.get("niah-single").examples(plain, 1536, 1, 0, wrap=lambda q, multiple_choice=False: q.upper()))


def test_prose_from_a_file(tmp_path: Path, plain: Any) -> None:
    path = tmp_path / "own.txt"
    path.write_text("Café life begins early. Is that so? It is!\nNobody minds. The number is 12.")
    (example,) = some(f"niah-single:haystack=prose:{path}", plain, 1536, n=1)
    check_length(example, plain, slack=0)
    check_blocks(example, plain)
    assert "Nobody minds. The number is 12. Café life begins early. Is that so? It is! " in example.prompt


def test_a_sentence_that_gives_the_answer_away_is_left_out(tmp_path: Path, plain: Any) -> None:
    path = tmp_path / "own.txt"
    path.write_text("It rains.")
    name = f"niah-single:haystack=prose:{path}"
    (first,) = some(name, plain, 1536, n=1)
    answer = first.questions[0].answers[0]
    path.write_text(f"It rains. The secret is {answer}.")
    assert some(name, plain, 1536, n=1)[0] == first
    path.write_text(f"The secret is {answer}.")
    with pytest.raises(ValueError, match="gives an answer away"):
        some(name, plain, 1536, n=1)


@pytest.mark.parametrize("name", [*NEEDLES, *COUNTS, *PROBES])
def test_too_small_a_context_says_what_it_takes(name: str, plain: Any, probe: Any) -> None:
    tokenizer = probe if name in PROBES else plain
    task, room = tasks.get(name), Room(tokenizer)
    assert isinstance(task, Generated)

    def make(context: int) -> Example:  # the same needles whatever the context
        return task.make(room, context, "key", random.Random("key"))

    with pytest.raises(ValueError, match=r"needs a context of at least \d+ tokens, got 16") as caught:
        make(16)
    least = int(re.findall(r"at least (\d+)", str(caught.value))[0])
    assert len(encode_example(tokenizer, make(least)).ids) + make(least).max_new_tokens == least
    for short in (least - 1, 1):
        with pytest.raises(ValueError, match=f"at least {least} tokens, got {short}: give more"):
            make(short)


@pytest.mark.parametrize("name", ["code-function", "code-constant", "code-caller"])
def test_too_small_a_context_for_code_does_not_speak_of_needles(name: str, plain: Any) -> None:
    with pytest.raises(ValueError, match=r"at least \d+ tokens, .*, got 1: give more, or ask for fewer questions"):
        some(name, plain, 1, n=1)


def test_a_text_of_one_token_predicts_nothing(plain: Any) -> None:
    with pytest.raises(ValueError, match=r"task 'text' needs a context of at least 2 tokens, .*, got 1: give more"):
        some("text", plain, 1, n=1)
    assert len(encode_example(plain, some("text", plain, 2, n=1)[0]).ids) == 2


def test_every_generated_task_is_checked_here() -> None:
    checked = {name.split(":")[0] for name in [*NEEDLES, *COUNTS, *SHARED, *PROBES]}
    assert checked == {name for name in tasks.names() if isinstance(tasks.get(name), Generated)}


@pytest.mark.parametrize("name", ["niah-single", "code-constant", "probe-needle"])
def test_a_begin_token_in_front_is_no_chat_template(name: str, plain: Any, probe: Any) -> None:
    """As a loaded model without a chat template words its prompts: the example is the tokenizer's own."""
    tokenizer = probe if name.startswith("probe") else plain
    (example,) = tasks.get(name).examples(
        tokenizer, 4096, 1, 0, wrap=lambda question, multiple_choice=False: tokenizer.bos_token + question
    )
    assert example.digest() == some(name, tokenizer, 4096, n=1)[0].digest()
    assert not example.templated
