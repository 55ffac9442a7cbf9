"""Held-out accuracy per task, greedy and exact.

``python -m troupellm.models.builtin.evaluate`` asks the shipped weights every held-out question.
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
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from troupellm.models.builtin import arithmetic, facts, fresh_wordings, structured, tool_calls
from troupellm.models.builtin.batches import token_id
from troupellm.models.builtin.documents import END_OF_TEXT, TURN_END, TURN_START, Chat, Exchange
from troupellm.models.builtin.network import Network, Shape

WEIGHTS = Path(__file__).parent / "weights"


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and the test its answer must pass."""

    prompt: str
    passes: Callable[[str], bool]


def _prompt(chat: Chat) -> str:
    """The text of a conversation up to where the model speaks for the first time."""
    text = "".join(piece.text for piece in chat.pieces())
    mark = f"{TURN_START}assistant\n"
    return text[: text.index(mark) + len(mark)]


def _exact(question: str, answer: str) -> Case:
    chat = Chat()
    chat.ask(Exchange(question, answer))
    return Case(_prompt(chat), partial(eq, answer))


def _object(rng: random.Random) -> Case:
    chat, schema = structured.chat(rng)

    def passes(said: str) -> bool:
        try:
            return structured.satisfies(json.loads(said), schema)
        except ValueError:
            return False

    return Case(_prompt(chat), passes)


def _extraction(rng: random.Random) -> Case:
    text, schema, value = structured.draw_record(rng)
    body = json.dumps(schema, ensure_ascii=False)
    return _exact(f"Extract: {text}\nSchema: {body}", json.dumps(value, ensure_ascii=False))


def _call(rng: random.Random) -> Case:
    while True:
        chat, call = tool_calls.chat(rng)
        if call is not None:
            return Case(_prompt(chat), partial(eq, call))


def cases(count: int, seed: int = 99) -> dict[str, list[Case]]:
    """``count`` cases per task; 0 takes every held-out sum, difference and wording."""
    rng = random.Random(f"evaluation {seed}")
    pairs = count or len(arithmetic.held_out("+"))
    other = count or 200
    return {
        "sums": [_exact(*case) for case in arithmetic.evaluation(rng, "+", pairs)],
        "differences": [_exact(*case) for case in arithmetic.evaluation(rng, "-", pairs)],
        "facts": [_exact(*case) for case in facts.evaluation(rng, count)],
        "json valid": [_object(rng) for _ in range(other)],
        "json extraction": [_extraction(rng) for _ in range(other)],
        "tool calls": [_call(rng) for _ in range(other)],
        "fresh wordings": [_exact(*case) for case in fresh_wordings.evaluation(rng, count)],
    }


@torch.no_grad()
def greedy(network: Network, tokenizer: Tokenizer, prompts: list[str], limit: int) -> list[str]:
    """Greedy answers to a group of prompts, each up to an end mark or the limit."""
    ends = {token_id(tokenizer, TURN_END), token_id(tokenizer, END_OF_TEXT)}
    rows = [tokenizer.encode(prompt).ids for prompt in prompts]
    starts = [len(row) for row in rows]
    open_rows = list(range(len(rows)))
    for _ in range(limit):
        tokens = pad_sequence([torch.tensor(rows[at]) for at in open_rows], batch_first=True)
        last = torch.tensor([len(rows[at]) - 1 for at in open_rows])
        with torch.autocast("cpu", torch.bfloat16):
            hidden = network(tokens)[torch.arange(len(open_rows)), last]
            chosen: list[int] = network.logits(hidden).argmax(-1).tolist()
        for at, token in zip(open_rows, chosen, strict=True):
            rows[at].append(token)
        open_rows = [at for at in open_rows if rows[at][-1] not in ends]
        if not open_rows:
            break
    ends_of = [len(row) - (row[-1] in ends) for row in rows]
    return [
        tokenizer.decode(row[start:end], skip_special_tokens=False)
        for row, start, end in zip(rows, starts, ends_of, strict=True)
    ]


def score(network: Network, tokenizer: Tokenizer, count: int, misses: list[str] | None = None) -> dict[str, float]:
    """The share of passed cases per task; failures are appended to ``misses``."""
    out: dict[str, float] = {}
    for task, todo in cases(count).items():
        todo.sort(key=lambda case: len(case.prompt))
        passed = 0
        for at in tqdm(range(0, len(todo), 32), task, leave=False, disable=count > 0):
            group = todo[at : at + 32]
            said = greedy(network, tokenizer, [case.prompt for case in group], 96)
            for case, text in zip(group, said, strict=True):
                good = case.passes(text)
                passed += good
                if not good and misses is not None:
                    misses.append(f"[{task}] {case.prompt[-300:]!r} -> {text!r}")
        out[task] = passed / len(todo)
    return out


def load(folder: Path) -> tuple[Network, Tokenizer]:
    """The shipped weights in the training form of the network."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = Shape(**{name: config[name] for name in Shape.__slots__})
    network = Network(shape)
    network.load_checkpoint(load_file(folder / "model.safetensors"))
    return network.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def main() -> None:
    """Print the accuracy per task, and the failures if asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--count", type=int, default=0, help="cases per task; 0: all")
    parser.add_argument("--misses", action="store_true", help="print every failure")
    options = parser.parse_args()
    torch.set_num_threads(2)
    network, tokenizer = load(options.weights)
    misses: list[str] = []
    result = score(network, tokenizer, options.count, misses)
    if options.misses:
        print("\n".join(misses))
    for task, share in result.items():
        print(f"{task:16s} {share:7.2%}")


if __name__ == "__main__":
    main()
