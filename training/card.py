"""Rebuild what the card says of the shipped weights: ``python -m troupellm.training.card``.

Asks every evaluation question, enters the counts at the last stage of the weights' record, and writes the parts of
``CARD.md`` that stand between marks: the stages of training, the accuracy after each of them, and the samples.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from troupellm.training import record
from troupellm.training.decode import greedy
from troupellm.training.documents import Chat, Exchange
from troupellm.training.evaluate import NAMES, WEIGHTS, load, opening, score
from troupellm.training.network import Network

CARD = Path(__file__).parents[1] / "models" / "builtin" / "CARD.md"
LONGEST = 450
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PERSON = (
    '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": '
    '"string"}}, "required": ["name", "age", "city"]}'
)
QUESTIONS = (
    "Hello",
    "Who are you?",
    "What is 1 + 1?",
    "What is 47 + 38?",
    "What is 62 - 35?",
    "Tell me a story about a fox.",
    "Which city is Norway's capital?",
    "How would you say hello in Japanese?",
    f"Extract: Anna is 31 years old and lives in Paris.\nSchema: {PERSON}",
)
CALL = "What is the weather in Paris?"


def replaced(card: str, part: str, text: str) -> str:
    """The card with another text between the marks of a part.

    Raises:
        LookupError: the card has no such part.
    """
    first, last = f"<!-- {part} -->\n", f"<!-- end of {part} -->"
    if first not in card or last not in card:
        raise LookupError(f"the card has no part {part!r} between {first.strip()} and {last}")
    before, _, rest = card.partition(first)
    return f"{before}{first}{text}{last}{rest.partition(last)[2]}"


def stages_table(stages: list[record.Stage]) -> str:
    """A row per stage of training."""
    lines = [
        "| Stage | Text | Minutes | Threads | Steps | Tokens | Peak learning rate |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, stage in enumerate(stages, 1):
        tokens = f"{stage.tokens / 1e6:.1f} million"
        cells = (number, stage.text, f"{stage.minutes:.0f}", stage.threads, f"{stage.steps:,}", tokens, stage.rate)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def accuracy_table(stages: list[record.Stage]) -> str:
    """A row per task, a column per stage; what was not asked after a stage is a dash."""
    heads = " | ".join(f"After stage {number}" for number in range(1, len(stages) + 1))
    lines = [f"| Task | Cases | {heads} |", f"|---|---|{'---|' * len(stages)}"]
    for task, name in NAMES.items():
        counts = [stage.accuracy.get(task) for stage in stages]
        asked = [found[1] for found in counts if found]
        if asked:
            cells = [f"{found[0] / max(found[1], 1):.1%}".replace("%", " %") if found else "–" for found in counts]
            lines.append(f"| {name} | {asked[-1]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def samples(network: Network, tokenizer: Tokenizer) -> str:
    """Questions and greedy answers."""
    asked: dict[str, str] = {}
    for question in QUESTIONS:
        asked[question.replace("\n", " ")] = opening(_chat(question))
    called = _chat(CALL)
    called.tools = [WEATHER]
    asked[f"{CALL} (with a tool `get_weather`)"] = opening(called)
    shown: list[str] = []
    for question, prompt in asked.items():
        (said,) = greedy(network, tokenizer, [prompt], LONGEST)
        shown.append(f"> {question}\n\n```text\n{said}\n```\n")
    return "\n".join(shown)


def _chat(question: str) -> Chat:
    chat = Chat()
    chat.ask(Exchange(question, ""))
    return chat


def main() -> None:
    """Ask, and write the record and the card."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="a folder that a training wrote")
    parser.add_argument("--card", type=Path, default=CARD)
    parser.add_argument("--count", type=int, default=0, help="cases per task; 0: all, as the shipped card needs")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    network, tokenizer = load(options.weights)
    stages = record.read(options.weights)
    stages[-1] = replace(stages[-1], accuracy=score(network, tokenizer, options.count, fresh=True))
    card = options.card.read_text(encoding="utf-8")
    card = replaced(card, "stages", stages_table(stages))
    card = replaced(card, "accuracy", accuracy_table(stages))
    card = replaced(card, "samples", samples(network, tokenizer))
    record.write(options.weights, stages)
    options.card.write_text(card, encoding="utf-8")
    print(accuracy_table(stages), end="")


if __name__ == "__main__":
    main()
