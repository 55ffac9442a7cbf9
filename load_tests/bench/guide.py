"""`bench guide`: what structured outputs cost, per token and before the first one, beside the same without."""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from troupellm.load_tests.contestants.workload import usable_cores
from troupellm.load_tests.random_model import SHAPES, write_random_model

if TYPE_CHECKING:
    from troupellm.actors.engine.engine import Engine
    from troupellm.protocol.params.guide import GuideSpec

TOKEN_TARGETS = {"builtin": 1.15, "125m": 1.02}
"""Time per output token with a guide over without."""
FIRST_TOKEN_TARGET = 0.050
"""Seconds that a new schema may add to the first token."""
ENDLESS = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
            "done": {"type": "boolean"},
        },
        "required": ["name", "count", "tags", "done"],
        "additionalProperties": False,
    },
}
_PROMPT_TOKENS = 32


class Ratio(msgspec.Struct):
    """Time per output token; seconds, an entry per round."""

    model: str
    batch: int
    plain: list[float]
    guided: list[float]
    plain_pieces: list[float] = []
    """Tokens that came at once, on average: with a guide those that it leaves no choice of come with the one before."""
    guided_pieces: list[float] = []

    @property
    def ratio(self) -> float:
        """Median over the rounds' own ratios, which share the machine's mood."""
        return median(ours / theirs for ours, theirs in zip(self.guided, self.plain, strict=True))


class FirstToken(msgspec.Struct):
    """Seconds to the first token, an entry per schema."""

    model: str
    plain: list[float]
    guided: list[float]

    @property
    def added(self) -> float:
        return median(ours - theirs for ours, theirs in zip(self.guided, self.plain, strict=True))


def run(args: argparse.Namespace) -> int:
    backend = {"use_uvloop": find_spec("uvloop") is not None}
    ratios, firsts = [], []
    for name in args.models:
        with _folder(name) as folder:
            found, first = anyio.run(_measure, args, name, folder, backend_options=backend)
        ratios += found
        firsts.append(first)
    print(_text(args, ratios, firsts))
    if args.result_json:
        content = {
            "num_threads": args.threads or usable_cores(),
            "output_len": args.output_len,
            "schema_bytes": args.schema_bytes,
            "embedded": args.embedded,
            "time_per_output_token": [msgspec.structs.asdict(ratio) | {"ratio": ratio.ratio} for ratio in ratios],
            "first_token": [msgspec.structs.asdict(first) | {"added": first.added} for first in firsts],
        }
        Path(args.result_json).write_text(json.dumps(content), encoding="utf-8")
    return 0


@contextmanager
def _folder(name: str) -> Iterator[Path | None]:
    if name == "builtin":
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="troupe-guide-") as directory:
        yield write_random_model(Path(directory) / "model", SHAPES[name])


async def _measure(args: argparse.Namespace, name: str, folder: Path | None) -> tuple[list[Ratio], FirstToken]:
    from troupellm.actors.engine.engine import Engine

    settings: dict[str, Any] = {"num_threads": args.threads or usable_cores(), "device": "cpu"}
    settings["worker_process"] = not args.embedded
    settings["spare_worker"] = False  # it would import torch beside the first rounds
    settings["enable_prefix_caching"] = False  # both sides have the same prompts
    async with Engine(folder, **settings) as engine:
        ratios = [await ratio_of(engine, name, batch, args.output_len, args.repeats) for batch in args.batches]
        return ratios, await _first_tokens(engine, args, name)


async def ratio_of(engine: "Engine", name: str, batch: int, output_len: int, repeats: int) -> Ratio:
    """Rounds of both in turn, another one first in each; the first ones warm up."""
    ratio = Ratio(name, batch, [], [])
    sides: list[tuple[list[float], list[float], GuideSpec | None]] = [
        (ratio.plain, ratio.plain_pieces, None),
        (ratio.guided, ratio.guided_pieces, _guide(ENDLESS)),
    ]
    for number in range(repeats + 1):
        for side, pieces, guide in sides if number % 2 else sides[::-1]:
            seconds, tokens = await _round(engine, batch, output_len, guide, number)
            if number:
                side.append(seconds)
                pieces.append(tokens)
    return ratio


async def _round(
    engine: "Engine", batch: int, output_len: int, guide: "GuideSpec | None", seed: int
) -> tuple[float, float]:
    """Seconds per output token, from when all requests of a batch have begun, the median over them; and tokens that
    came at once."""
    pieces: list[list[tuple[float, int]]] = []
    """Per request, when each piece came, and how many tokens there were with it."""

    async def read(number: int) -> None:
        source = random.Random(1000 * seed + number)
        prompt = [source.randrange(3, 250) for _ in range(_PROMPT_TOKENS)]
        options: dict[str, Any] = {"max_tokens": output_len, "temperature": 1.0, "seed": number, "ignore_eos": True}
        count, own = 0, []
        async with engine.stream(prompt, guide=guide, **options) as stream:
            async for delta in stream:
                count += len(delta.token_ids)
                own.append((time.perf_counter(), count))
        pieces.append(own)

    async with anyio.create_task_group() as group:
        for number in range(batch):
            group.start_soon(read, number)
    begun = max(own[0][0] for own in pieces)
    spans = [(next(piece for piece in own if piece[0] >= begun), own[-1]) for own in pieces if own[-1][0] > begun]
    seconds = median((last[0] - first[0]) / (last[1] - first[1]) for first, last in spans if last[1] > first[1])
    return seconds, sum(own[-1][1] for own in pieces) / sum(len(own) for own in pieces)


async def _first_tokens(engine: "Engine", args: argparse.Namespace, name: str) -> FirstToken:
    """Each schema is new."""
    first = FirstToken(name, [], [])
    source = random.Random(0)
    for number in range(args.schemas + 1):
        guide = _guide(new_schema(args.schema_bytes, source))
        prompt = [source.randrange(3, 250) for _ in range(_PROMPT_TOKENS)]
        sides: list[tuple[list[float], GuideSpec | None]] = [(first.plain, None), (first.guided, guide)]
        for side, wanted in sides if number % 2 else sides[::-1]:
            begin = time.perf_counter()
            async with engine.stream(prompt, max_tokens=2, temperature=1.0, guide=wanted, ignore_eos=True) as stream:
                await anext(stream)
            if number:
                side.append(time.perf_counter() - begin)
    return first


def new_schema(size: int, source: random.Random) -> dict[str, Any]:
    """An object's schema of so many bytes, with names that no other one has."""
    properties: dict[str, Any] = {}
    schema: dict[str, Any] = {"type": "object", "properties": properties, "additionalProperties": False}
    kinds: list[dict[str, Any]] = [
        {"type": "string", "minLength": 1, "maxLength": 40},
        {"type": "integer", "minimum": 0, "maximum": 100_000},
        {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 8},
        {"enum": ["north", "east", "south", "west"]},
        {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
            "required": ["street"],
            "additionalProperties": False,
        },
    ]
    while len(json.dumps(schema)) < size:
        properties[f"field_{source.randrange(16**8):08x}"] = kinds[len(properties) % len(kinds)]
        schema["required"] = list(properties)
    return schema


def _guide(schema: dict[str, Any]) -> "GuideSpec":
    from troupellm.protocol.params.guide import GuideSpec

    return GuideSpec(kind="json_schema", source=json.dumps(schema))


def _text(args: argparse.Namespace, ratios: list[Ratio], firsts: list[FirstToken]) -> str:
    lines = [f"{args.output_len} tokens per answer, {args.repeats} rounds; a schema of {args.schema_bytes} bytes"]
    lines.append(f"{'model':8} {'batch':>5} {'plain ms/token':>15} {'guided ms/token':>16} {'ratio':>6}  target")
    for ratio in ratios:
        target = TOKEN_TARGETS.get(ratio.model)
        lines.append(
            f"{ratio.model:8} {ratio.batch:5} {1000 * median(ratio.plain):15.3f} {1000 * median(ratio.guided):16.3f} "
            f"{ratio.ratio:6.3f}  {'' if target is None else f'<= {target}'}"
        )
    lines.append(f"{'model':8} {'first token ms':>15} {'with a new schema':>18} {'added ms':>9}  target")
    lines += [
        f"{first.model:8} {1000 * median(first.plain):15.2f} {1000 * median(first.guided):18.2f} "
        f"{1000 * first.added:9.2f}  <= {1000 * FIRST_TOKEN_TARGET:.0f}"
        for first in firsts
    ]
    return "\n".join(lines)
