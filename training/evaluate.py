"""Held-out accuracy per task, greedy and exact.

``python -m troupellm.training.evaluate`` asks the shipped weights every held-out question, in
float32 with a cache; ``--report`` writes a table. The card is rebuilt by ``python -m
troupellm.training.card``.
"""

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import eq
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tqdm import tqdm

from troupellm.training import arithmetic, dialogue, facts, json_objects, tool_calls, wordings_heldout
from troupellm.training.decode import greedy
from troupellm.training.documents import TURN_START, Chat, Exchange
from troupellm.training.network import Network, Shape

WEIGHTS = Path(__file__).parents[1] / "models" / "builtin" / "weights"
GROUP = 64
# Counting to one hundred takes four tokens a number.
LIMITS = {"counting": 450}
NAMES = {
    "sums": "Sums, operands 0 to 99, held-out pairs",
    "differences": "Differences, operands 0 to 99, held-out pairs",
    "differences below zero": "– of these, results below zero",
    "small sums, plain": "Sums, every pair of operands 0 to 12, asked “What is 1 + 1?”",
    "small sums": "– in eight usual wordings",
    "small differences, plain": "Differences, every pair of operands 0 to 12, asked “What is 2 - 1?”",
    "small differences": "– in eight usual wordings",
    "facts, combinations": "Facts, held-out combinations of known openers and phrases",
    "facts, openers": "Facts, openers that training never saw",
    "facts, phrases": "Facts, phrases that training never saw, of words that it saw",
    "facts, new words": "Facts, phrases with a word that training never saw (“the preterite of”)",
    "facts, fresh": "Facts in fresh wordings, written apart from the grammar",
    "json simple": "JSON made up, one to four usual fields: parses and satisfies the schema (unguided)",
    "json valid": "JSON made up, up to six fields, a third with made-up names",
    "json own names": "– every field name made up",
    "json extraction": "JSON: values read out of a sentence, exact",
    "tool calls": "Tool call: exact name and arguments",
    "tool calls, own names": "Tool call: tool and argument names made up, exact",
    "counting": "Counting: exact, stops where it should",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and the test its answer must pass."""

    prompt: str
    passes: Callable[[str], bool]


def opening(chat: Chat) -> str:
    """The text of a conversation up to where the model speaks for the first time."""
    text = "".join(piece.text for piece in chat.pieces())
    mark = f"{TURN_START}assistant\n"
    return text[: text.index(mark) + len(mark)]


def _exact(question: str, answer: str) -> Case:
    chat = Chat()
    chat.ask(Exchange(question, answer))
    return Case(opening(chat), partial(eq, answer))


def _object(rng: random.Random, foreign: float, most: int = 6) -> Case:
    chat, schema = json_objects.chat(rng, foreign=foreign, made=True)
    while len(schema["properties"]) > most:
        chat, schema = json_objects.chat(rng, foreign=foreign, made=True)

    def passes(said: str) -> bool:
        try:
            return json_objects.satisfies(json.loads(said), schema)
        except ValueError:
            return False

    return Case(opening(chat), passes)


def _extraction(rng: random.Random) -> Case:
    text, schema, value = json_objects.draw_record(rng)
    body = json.dumps(schema, ensure_ascii=False)
    return _exact(f"Extract: {text}\nSchema: {body}", json.dumps(value, ensure_ascii=False))


def _call(rng: random.Random) -> Case:
    while True:
        chat, call = tool_calls.chat(rng)
        if call is not None:
            return Case(opening(chat), partial(eq, call))


def _strange_call(rng: random.Random) -> Case:
    chat, call = tool_calls.strange_chat(rng)
    return Case(opening(chat), partial(eq, call))


def _counting(rng: random.Random) -> Case:
    made = dialogue.counting(rng)
    return _exact(made.user, made.assistant)


def _small(sign: str, count: int, seed: int) -> dict[str, list[Case]]:
    """Small operands, with draws of their own: the other tasks ask what they asked without them."""
    rng = random.Random(f"small {sign} {seed}")
    asked = {problem: arithmetic.usual(problem) for problem in arithmetic.small_problems(sign)}
    name = "small sums" if sign == "+" else "small differences"
    parts = {
        f"{name}, plain": [wordings[0] for wordings in asked.values()],
        name: [case for wordings in asked.values() for case in wordings],
    }
    return {
        part: [_exact(*case) for case in (rng.sample(todo, min(count, len(todo))) if count else todo)]
        for part, todo in parts.items()
    }


def cases(count: int, seed: int = 99) -> dict[str, list[Case]]:
    """``count`` cases per task; 0 takes every held-out pair and asks for every fact in every way."""
    rng = random.Random(f"evaluation {seed}")
    pairs = count or arithmetic.LIMIT**2
    other = count or 300
    differences = arithmetic.evaluation(rng, "-", pairs)
    return {
        "sums": [_exact(*case) for case in arithmetic.evaluation(rng, "+", pairs)],
        "differences": [_exact(*case) for case in differences],
        "differences below zero": [_exact(*case) for case in differences if "= -" in case[1]],
        **{
            f"facts, {part}": [_exact(*case) for case in facts.evaluation(rng, part, count)]
            for part in ("combinations", "openers", "phrases")
        },
        "facts, new words": [_exact(*case) for case in facts.evaluation(rng, "phrases", count, new_words=True)],
        "facts, fresh": [_exact(*case) for case in wordings_heldout.evaluation(rng, count)],
        "json simple": [_object(rng, 0.0, 4) for _ in range(other)],
        "json valid": [_object(rng, 0.35) for _ in range(other)],
        "json own names": [_object(rng, 1.0) for _ in range(other)],
        "json extraction": [_extraction(rng) for _ in range(other)],
        "tool calls": [_call(rng) for _ in range(other)],
        "tool calls, own names": [_strange_call(rng) for _ in range(other)],
        "counting": [_counting(rng) for _ in range(count or 100)],
        **_small("+", count, seed),
        **_small("-", count, seed),
    }


def score(
    network: Network, tokenizer: Tokenizer, count: int, misses: list[str] | None = None, *, fresh: bool = False
) -> dict[str, tuple[int, int]]:
    """Passed and asked per task; failures are appended to ``misses``.

    The fresh wordings are left out unless requested: looking at them during training would make them known ones.
    """
    out: dict[str, tuple[int, int]] = {}
    for task, todo in cases(count).items():
        if task == "facts, fresh" and not fresh:
            continue
        todo.sort(key=lambda case: len(case.prompt))
        passed = 0
        for at in tqdm(range(0, len(todo), GROUP), task, leave=False, disable=count > 0):
            group = todo[at : at + GROUP]
            said = greedy(network, tokenizer, [case.prompt for case in group], LIMITS.get(task, 128))
            for case, text in zip(group, said, strict=True):
                good = case.passes(text)
                passed += good
                if not good and misses is not None and task != "facts, fresh":
                    misses.append(f"[{task}] {case.prompt[-300:]!r} -> {text!r}")
        out[task] = (passed, len(todo))
    return out


def table(result: dict[str, tuple[int, int]]) -> str:
    """The result as the card shows it."""
    lines = ["| Task | Cases | Correct |", "|---|---|---|"]
    for task in (task for task in NAMES if task in result):
        passed, asked = result[task]
        lines.append(f"| {NAMES[task]} | {asked} | {passed / max(asked, 1):.1%} |".replace("%", " %"))
    return "\n".join(lines) + "\n"


def load(folder: Path) -> tuple[Network, Tokenizer]:
    """The shipped weights in the training form of the network."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = Shape(**{name: config[name] for name in Shape.__slots__})
    network = Network(shape)
    network.load_checkpoint(load_file(folder / "model.safetensors"))
    return network.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def main() -> None:
    """Print the accuracy per task, and the failures if asked for."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--count", type=int, default=0, help="cases per task; 0: all")
    parser.add_argument("--misses", action="store_true", help="print every failure, save those in fresh wordings")
    parser.add_argument("--fresh", action="store_true", help="ask in the fresh wordings too: once, at the very end")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report", type=Path, help="write a table (.md) and the counts (.json) here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    network, tokenizer = load(options.weights)
    misses: list[str] = []
    result = score(network, tokenizer, options.count, misses, fresh=options.fresh)
    if options.misses:
        print("\n".join(misses))
    print(table(result), end="")
    if options.report:
        options.report.with_suffix(".md").write_text(table(result), encoding="utf-8")
        counts = {task: {"passed": passed, "asked": asked} for task, (passed, asked) in result.items()}
        options.report.with_suffix(".json").write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
