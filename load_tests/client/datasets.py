"""The prompts: made up from a seed, or read from the user's own file. Nothing is downloaded."""

import json
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from troupellm.load_tests.client.records import SampleRequest

FIRST_RANDOM_ID = 256
"""Below lie the special and byte tokens of most vocabularies."""
CHARACTERS_PER_TOKEN = 4
"""Rough rule for files that name no output length."""

_TEXT = (
    "the river ran past a small house where children sang about snow and bread while their mother read old letters "
    "by lamp light and a grey cat slept under the table near warm stones until morning came over green hills"
)
_WORDS = _TEXT.split()


class DatasetError(Exception):
    """The data set cannot be made; the text names the flag or the file."""


class PromptMaker:
    """Random prompts: token ids where the endpoint takes them, words for chat (there the length is a rough one)."""

    def __init__(self, generator: random.Random, *, chat: bool, vocab_size: int) -> None:
        self._generator = generator
        self._chat = chat
        self._ids = range(min(FIRST_RANDOM_ID, vocab_size // 2), vocab_size)

    def piece(self, length: int) -> list[Any]:
        source = _WORDS if self._chat else self._ids
        return self._generator.choices(source, k=length)

    def finish(self, piece: list[Any]) -> str | list[int]:
        return " ".join(piece) if self._chat else piece


def make_requests(args: Namespace, more: int = 0) -> list[SampleRequest]:
    """The run's requests, the same for the same flags and seed.

    Args:
        more: requests of the same kind behind them, to be sent before the run. They share the prefixes of the run's
            and no more than that, so that no prefix cache knows a prompt of the run when it comes; of a file that is
            too short they are the run's own.

    Raises:
        DatasetError: a file is missing or has another form, or a flag does not fit.
    """
    return _DATASETS[args.dataset_name](args, random.Random(args.seed), more)


def _random(args: Namespace, generator: random.Random, more: int) -> list[SampleRequest]:
    maker = PromptMaker(generator, chat=args.backend == "openai-chat", vocab_size=args.random_vocab_size)
    prefix = maker.piece(args.random_prefix_len)
    requests = []
    for _ in range(args.num_prompts + more):
        input_len = _spread(generator, args.random_input_len, args.random_range_ratio)
        output_len = _spread(generator, args.random_output_len, args.random_range_ratio)
        requests.append(SampleRequest(prompt=maker.finish(prefix + maker.piece(input_len)), output_len=output_len))
    return requests


def _spread(generator: random.Random, length: int, ratio: float) -> int:
    """Uniform in length * [1 - ratio, 1 + ratio], at least 1."""
    return max(1, generator.randint(round(length * (1 - ratio)), round(length * (1 + ratio))))


def _prefix_repetition(args: Namespace, generator: random.Random, more: int) -> list[SampleRequest]:
    """Groups that share a prefix, shuffled, so that the prefix cache is what is measured."""
    maker = PromptMaker(generator, chat=args.backend == "openai-chat", vocab_size=args.random_vocab_size)
    prefixes = [maker.piece(args.prefix_repetition_prefix_len) for _ in range(args.prefix_repetition_num_prefixes)]

    def one(index: int) -> SampleRequest:
        prompt = prefixes[index % len(prefixes)] + maker.piece(args.prefix_repetition_suffix_len)
        return SampleRequest(prompt=maker.finish(prompt), output_len=args.prefix_repetition_output_len)

    requests = [one(index) for index in range(args.num_prompts)]
    generator.shuffle(requests)
    return requests + [one(index) for index in range(more)]


def _sharegpt(args: Namespace, generator: random.Random, more: int) -> list[SampleRequest]:
    """First question of each conversation; the recorded answer's size is the output length unless one is given."""
    path = _path(args)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        turns = [entry["conversations"][:2] for entry in entries if len(entry.get("conversations", ())) >= 2]
        pairs = [(question["value"], answer["value"]) for question, answer in turns]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(f"--dataset-path {path}: not a ShareGPT file ({error})") from None
    generator.shuffle(pairs)
    requests = [
        SampleRequest(prompt=question, output_len=args.sharegpt_output_len or _rough_tokens(answer))
        for question, answer in pairs
    ]
    return _enough(requests, args.num_prompts + more, path)


def _custom(args: Namespace, generator: random.Random, more: int) -> list[SampleRequest]:
    """JSON lines with `prompt` and, if wanted, `output_tokens`."""
    path = _path(args)
    requests = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                entry = json.loads(line)
                output_len = int(entry.get("output_tokens", args.custom_output_len))
                requests.append(SampleRequest(prompt=entry["prompt"], output_len=output_len))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(f"--dataset-path {path}: not JSON lines with a prompt ({error})") from None
    return _enough(requests, args.num_prompts + more, path)


def _path(args: Namespace) -> Path:
    if args.dataset_path is None:
        raise DatasetError(f"--dataset-name {args.dataset_name} needs --dataset-path")
    return Path(args.dataset_path)


def _enough(requests: list[SampleRequest], count: int, path: Path) -> list[SampleRequest]:
    """As many as were asked for, going round the file again when it is shorter."""
    if not requests:
        raise DatasetError(f"--dataset-path {path}: no prompts in it")
    return [requests[index % len(requests)] for index in range(count)]


def _rough_tokens(text: str) -> int:
    return min(1024, max(4, len(text) // CHARACTERS_PER_TOKEN))


_DATASETS: dict[str, Callable[[Namespace, random.Random, int], list[SampleRequest]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "custom": _custom,
    "prefix_repetition": _prefix_repetition,
}
DATASET_NAMES = tuple(_DATASETS)
