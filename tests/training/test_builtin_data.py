"""The built-in model's data: seeded, honest about what is held out, and true to its own template."""

import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer

from troupellm.training import (
    arithmetic,
    corpus,
    dialogue,
    facts,
    json_objects,
    tool_calls,
    wordings_heldout,
)
from troupellm.training.decode import greedy
from troupellm.training.documents import Chat, Exchange
from troupellm.training.evaluate import WEIGHTS, cases, load

DOCUMENTS = 4000


@pytest.fixture(scope="module")
def texts() -> list[str]:
    stream = itertools.chain(
        itertools.islice(corpus.documents("training 1 from 0 512"), DOCUMENTS),
        itertools.islice(corpus.long_documents("training 1 from 0 2048", 6000), 100),
        itertools.islice(
            corpus.documents(f"training 1 from 0 512 {corpus.CONTINUED}", corpus.CONTINUED), DOCUMENTS // 2
        ),
    )
    return ["".join(piece.text for piece in pieces) for pieces in stream]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))


@pytest.fixture(scope="module")
def template() -> jinja2.Template:
    config = json.loads((WEIGHTS / "tokenizer_config.json").read_text(encoding="utf-8"))
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(config["chat_template"])


def test_the_same_seed_gives_the_same_corpus() -> None:
    first, again, other = (list(itertools.islice(corpus.documents(seed), 300)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_a_fixed_share_of_the_pairs_is_held_out() -> None:
    for sign in "+-":
        drawn = arithmetic.LIMIT**2 * arithmetic.HELD_OUT_SHARE
        assert 0.97 * drawn < len(arithmetic.held_out(sign)) < drawn


def test_held_out_pairs_never_appear_in_training_text(texts: list[str]) -> None:
    patterns = (
        (r"(\d+) ?\+ ?(\d+)", "+"),
        (r"(\d+) plus (\d+)", "+"),
        (r"(?:[Aa]dd|sum of|total of) (\d+) and (\d+)", "+"),
        (r"(\d+) ?- ?(\d+)", "-"),
        (r"(\d+) (?:minus|take away|less|−) (\d+)", "-"),
    )
    seen = 0
    for text in texts:
        for pattern, sign in patterns:
            for left, right in re.findall(pattern, text):
                seen += 1
                assert not arithmetic.is_held_out((int(left), sign, int(right)))
    assert seen > 1000


def test_every_solved_line_of_the_training_text_is_right(texts: list[str]) -> None:
    lines = re.findall(r"(?<![\d-])(\d+) ([+-]) (\d+) = (-?\d+)", "\n".join(texts))
    assert len(lines) > 1000
    for left, sign, right, result in lines:
        assert int(result) == int(left) + int(right) * (1 if sign == "+" else -1)


@pytest.mark.slow
def test_held_out_wordings_never_appear_in_training_text(texts: list[str]) -> None:
    whole = "\n".join(texts).lower()
    rng = random.Random(0)
    asked = [q for part in ("openers", "phrases") for q, _ in facts.evaluation(rng, part, 0)]
    asked += [question for question, _ in wordings_heldout.evaluation(rng, 0)]
    assert len(asked) > 1400
    assert not [question for question in asked if question.lower() in whole]


def test_arithmetic_answers_repeat_the_numbers_asked_for() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        made = arithmetic.exchange(rng)
        left, right = re.findall(r"\d+", made.assistant)[:2]
        assert sorted((left, right)) == sorted(re.findall(r"\d+", made.user))


def test_counting_begins_and_ends_with_the_numbers_asked_for() -> None:
    rng = random.Random(4)
    for _ in range(300):
        made = dialogue.counting(rng)
        numbers = made.assistant.split(", ")
        assert re.findall(r"\d+", made.user)[-1] == numbers[-1]
        assert len(set(numbers)) == abs(int(numbers[0]) - int(numbers[-1])) + 1


def test_generated_objects_satisfy_their_schema() -> None:
    rng = random.Random(3)
    for _ in range(1000):
        chat, schema = json_objects.chat(rng)
        assert json_objects.satisfies(json.loads(chat.turns[-1][1]), schema)


def test_made_up_objects_have_one_to_six_fields_of_every_kind() -> None:
    rng = random.Random(8)
    made = [json_objects.draw_object(rng, 1.0) for _ in range(300)]
    assert {len(value) for _, value in made} == {1, 2, 3, 4, 5, 6}
    kinds = {frozenset(declared) - {"title"} for schema, _ in made for declared in schema["properties"].values()}
    assert kinds == {frozenset(k) for k in (("type",), ("type", "enum"), ("type", "minimum", "maximum"))}
    assert len({key for _, value in made for key in value}) > 500


def test_calls_of_tools_with_made_up_names_say_what_was_asked_for() -> None:
    rng = random.Random(9)
    for _ in range(300):
        chat, call = tool_calls.strange_chat(rng)
        body = json.loads(call.split("\n")[1])
        asked = chat.turns[0][1]
        assert body["name"] in asked
        assert all(key in asked and str(value) in asked for key, value in body["arguments"].items())
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in chat.tools}
        assert set(body["arguments"]) == set(offered[body["name"]]["properties"])


def test_generated_calls_are_valid_for_a_tool_on_offer() -> None:
    rng = random.Random(4)
    called = 0
    for _ in range(500):
        chat, call = tool_calls.chat(rng)
        if call is None:
            continue
        called += 1
        body = json.loads(call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in chat.tools}
        assert set(body["arguments"]) == set(offered[body["name"]]["properties"])
    assert called > 300


def test_the_checker_rejects_what_does_not_fit() -> None:
    schema = {"properties": {"size": {"type": "string", "enum": ["small"]}, "age": {"type": "integer"}}}
    assert json_objects.satisfies({"size": "small", "age": 3}, schema)
    ranged = {"properties": {"age": {"type": "integer", "minimum": 3, "maximum": 5}}}
    assert json_objects.satisfies({"age": 5}, ranged)
    assert not json_objects.satisfies({"age": 6}, ranged)
    for wrong in ({"size": "big", "age": 3}, {"size": "small", "age": True}, {"size": "small"}, [], "x"):
        assert not json_objects.satisfies(wrong, schema)


def _render(template: jinja2.Template, chat: Chat, **extra: Any) -> str:
    messages = [{"role": role, "content": content} for role, content, _ in chat.turns]
    if chat.system is not None:
        messages.insert(0, {"role": "system", "content": chat.system})
    return template.render(messages=messages, tools=list(chat.tools) or None, **extra)


def test_training_text_is_what_the_chat_template_renders(template: jinja2.Template) -> None:
    rng = random.Random(5)
    chats = [json_objects.chat(rng)[0] for _ in range(50)] + [tool_calls.chat(rng)[0] for _ in range(50)]
    for chat in chats:
        text = "".join(piece.text for piece in chat.pieces())
        assert _render(template, chat, add_generation_prompt=False) == text


def test_a_call_given_as_structure_renders_as_the_call_that_was_trained(template: jinja2.Template) -> None:
    rng = random.Random(6)
    chat, call = tool_calls.chat(rng)
    while call is None:
        chat, call = tool_calls.chat(rng)
    function = json.loads(call.split("\n")[1])
    chat.turns = chat.turns[:1]
    as_text = _render(template, chat) + f"<|im_start|>assistant\n{call}<|im_end|>\n"
    messages = [
        {"role": "user", "content": chat.turns[0][1]},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
    ]
    assert template.render(messages=messages, tools=list(chat.tools)) == as_text


def test_the_generation_prompt_is_where_the_answer_begins(template: jinja2.Template) -> None:
    chat = Chat()
    chat.ask(Exchange("Hello", "Hello!"))
    text = "".join(piece.text for piece in chat.pieces())
    chat.turns.pop()
    prompt = _render(template, chat, add_generation_prompt=True)
    assert text == prompt + "Hello!<|im_end|>\n"


@given(st.text(max_size=200))
@settings(deadline=None, max_examples=200)
def test_the_tokenizer_round_trips_any_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_every_digit_is_a_token_and_so_are_the_marks(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("23+45").tokens == ["2", "3", "+", "4", "5"]
    for mark in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>"):
        assert len(tokenizer.encode(mark).ids) == 1
    kept = tokenizer.decode(tokenizer.encode("<tool_call>x</tool_call><|im_end|>").ids)
    assert kept == "<tool_call>x</tool_call>"


def test_greedy_decoding_in_a_group_is_what_the_network_says_alone() -> None:
    network, tokenizer = load(WEIGHTS)
    prompts = [case.prompt for case in itertools.chain(*(group[:1] for group in cases(1).values()))][:4]
    together = greedy(network, tokenizer, prompts, 12)
    for prompt, said in zip(prompts, together, strict=True):
        tokens = tokenizer.encode(prompt).ids
        start = len(tokens)
        for _ in range(12):
            with torch.no_grad():
                hidden = network(torch.tensor([tokens]))[0, -1]
                tokens.append(int(network.logits(hidden).argmax()))
            if tokens[-1] == tokenizer.token_to_id("<|im_end|>"):
                tokens.pop()
                break
        assert tokenizer.decode(tokens[start:], skip_special_tokens=False) == said


def test_evaluation_cases_are_the_same_every_time() -> None:
    first, again = cases(5), cases(5)
    assert [[case.prompt for case in group] for group in first.values()] == [
        [case.prompt for case in group] for group in again.values()
    ]


def test_the_shipped_folder_is_small_and_complete() -> None:
    names = {path.name for path in Path(WEIGHTS).iterdir()}
    assert names >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert "model.safetensors" in names
    assert sum(path.stat().st_size for path in Path(WEIGHTS).iterdir()) <= 12_000_000
