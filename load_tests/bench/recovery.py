"""`bench recovery`: the worker process of a real server is killed under its streams, which go on with the same tokens.

Each kill has a server of its own, so that none of them meets what an earlier one left. The expected tokens come from
another server, which answers the same requests one by one.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from troupellm.load_tests.traffic.own_server import START_SECONDS, OwnServer, own_server, processor_ticks
from troupellm.load_tests.traffic.streams import Asked, Kill, alone, kill_under, requests
from troupellm.protocol.errors import ConfigError

BARS = {"spare": 3.0, "no-spare": 5.0}
"""Seconds within which the first new token is wanted, with the built-in model."""
FLAGS: dict[str, tuple[str, ...]] = {"spare": (), "no-spare": ("--no-spare-worker",)}
SETTLED_SECONDS = 1.0
"""A spare has imported everything when it has used no processor time for so long."""


class Side(msgspec.Struct):
    name: str
    kills: list[Kill] = []

    @property
    def first_new_token(self) -> list[float]:
        return [kill.first_new_token for kill in self.kills]

    @property
    def every_stream(self) -> list[float]:
        return [kill.every_stream for kill in self.kills]

    @property
    def kept(self) -> bool:
        return median(self.first_new_token) < BARS[self.name]


def run(args: argparse.Namespace) -> int:
    """1 when a stream failed or has other tokens than alone.

    Raises:
        ConfigError: the servers would have no worker process to kill.
        RuntimeError: a server did not do its part.
    """
    check_flags(args.serve_arg)
    sides = asyncio.run(_measure(args))
    print(table(sides, args.streams))
    failures = [f"{side.name}: {failure}" for side in sides for kill in side.kills for failure in kill.failures]
    for failure in failures:
        print(f"bench recovery: {failure}", file=sys.stderr)
    if args.result_json:
        Path(args.result_json).write_bytes(msgspec.json.encode({"streams": args.streams, "sides": sides}))
    return 1 if failures else 0


def check_flags(serve_arg: Sequence[str]) -> None:
    """
    Raises:
        ConfigError: with these flags, a configuration file or the environment, the model runs in the server's process.
    """
    from troupellm.server.cli import serve
    from troupellm.server.cli.flags import load_configs, translate

    parser = argparse.ArgumentParser(prog="troupellm", allow_abbrev=False)
    serve.register(parser.add_subparsers())
    config, _ = load_configs(parser.parse_args(translate(["serve", *serve_arg])))
    if config.worker.worker_process is False:
        raise ConfigError(
            "bench recovery needs a worker process to kill: leave --no-worker-process out", param="worker_process"
        )


async def _measure(args: argparse.Namespace) -> list[Side]:
    """Another side begins each round."""
    from tqdm import tqdm

    asked = requests(args.streams, args.max_tokens)
    sides = [Side(name) for name in args.sides]
    with tqdm(total=1 + args.rounds * len(sides), unit="server") as bar:
        bar.set_description("alone")
        async with own_server(args.model, [*args.serve_arg, *FLAGS["no-spare"]]) as server:
            expected = await alone(server, asked)
            await server.end()
        bar.update()
        for number in range(args.rounds):
            for side in sides if number % 2 else sides[::-1]:
                bar.set_description(side.name)
                side.kills.append(await _one_kill(args, side.name, asked, expected))
                bar.update()
    return sides


async def _one_kill(args: argparse.Namespace, name: str, asked: list[Asked], expected: list[list[int]]) -> Kill:
    async with own_server(args.model, [*args.serve_arg, *FLAGS[name]]) as server:
        if name == "spare":
            await _spare_stands_by(server)
        kill = await kill_under(server, asked, expected)
        await server.end()
    return kill


async def _spare_stands_by(server: OwnServer) -> None:
    """Until there is a second worker process, which has nothing left to import."""
    used = -1
    async with asyncio.timeout(START_SECONDS):
        while (now := sum(processor_ticks(pid) for pid in server.workers()[1:])) != used or not now:
            used = now
            await asyncio.sleep(SETTLED_SECONDS)


def table(sides: list[Side], streams: int) -> str:
    lines = [f"SIGKILL of the worker under {streams} streams; seconds from the kill, medians (most)"]
    lines.append(f"{'':<12}{'kills':>6}{'first new token':>20}{'every stream':>20}{'failures':>10}")
    for side in sides:
        first, every = side.first_new_token, side.every_stream
        failures = sum(len(kill.failures) for kill in side.kills)
        lines.append(
            f"{side.name:<12}{len(side.kills):>6}{median(first):>12.2f} ({max(first):.2f})"
            f"{median(every):>13.2f} ({max(every):.2f}){failures:>10}"
            f"   first wanted within {BARS[side.name]:g} s   {'kept' if side.kept else 'MISSED'}"
        )
    return "\n".join(lines)
