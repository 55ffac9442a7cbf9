"""`bench serve --peers`: our server in its layouts beside llama-server and vLLM's, on the same work in turn.

All servers of a model are up; in every round each has its turn, while the others are stopped. Requests one by one give
times to the first token and between tokens, many at once give tokens per second. Numbers are medians over the rounds.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from troupellm.load_tests.client.client import Target
from troupellm.load_tests.client.driver import drive
from troupellm.load_tests.client.records import SampleRequest
from troupellm.load_tests.contestants.workload import turns
from troupellm.load_tests.peers.cells import Cell
from troupellm.load_tests.peers.checkpoints import model_for
from troupellm.load_tests.peers.environments import SIDES, TROUPE, environment_of, link_package, processor, python_of
from troupellm.load_tests.peers.process import Contestant, ContestantError, unwinding
from troupellm.load_tests.peers.server_process import ServerProcess
from troupellm.load_tests.peers.servers import RIVALS, SERVERS, home_of, plan_server
from troupellm.load_tests.random_model import SHAPES

START_SECONDS = 900.0
RUN_SECONDS = 900.0
MOST_ITL, LEAST_RATE = 1.1, 1.2
"""Of llama-server's time between tokens, and of the better rival's tokens per second."""

TIMED = "24m"
"""The model on which times are judged."""


class Measured(msgspec.Struct):
    """One server on one model: a number per round."""

    itl_ms: list[float] = []
    tpot_ms: list[float] = []
    ttft_ms: list[float] = []
    rate: list[float] = []

    def medians(self) -> dict[str, float]:
        return {name: median(values) for name, values in msgspec.structs.asdict(self).items() if values}


class Judgement(msgspec.Struct, frozen=True):
    what: str
    found: float
    wanted: float
    at_most: bool = False
    missing: tuple[str, ...] = ()
    """Rivals that it is about and that have no number."""

    @property
    def reached(self) -> bool:
        return self.found <= self.wanted if self.at_most else self.found >= self.wanted

    @property
    def kept(self) -> bool:
        """Nothing is kept while numbers are missing."""
        return self.reached and not self.missing


def run(args: argparse.Namespace) -> int:
    """0 when every server answered everything, 1 otherwise."""
    servers = args.peers or list(SERVERS)
    if unknown := [name for name in servers if name not in SERVERS]:
        print(f"bench serve: {unknown[0]} is none of {', '.join(SERVERS)}", file=sys.stderr)
        return 2
    with unwinding(), ExitStack() as stack:
        work = args.work_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="troupe-serve-"))
        bench = PeerBench(args, Path(work).absolute())
        for config in args.configs:
            bench.compete(config, servers)
    print("\n" + judgement_text(judge(bench.found)))
    for failure in bench.failures:
        print(f"bench serve: {failure}", file=sys.stderr)
    return 1 if bench.failures else 0


class PeerBench:
    """The measurements so far, by configuration and server."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self._args, self._work, self._link = args, work, link_package(work / "import")
        self._threads = args.num_threads or len(os.sched_getaffinity(0))
        self.found: dict[str, dict[str, Measured]] = {}
        self.failures: list[str] = []

    def compete(self, config: str, names: Sequence[str]) -> None:
        servers: dict[str, ServerProcess] = {}
        found = self.found[config] = {name: Measured() for name in names}
        try:
            for name in dict.fromkeys(names):
                self._start(name, config, servers)
            for number in range(self._args.rounds + 1):
                for name in turns(list(servers), number):
                    self._turn(name, config, number, servers, found[name])
                self._write()
            print(f"\n{table(config, self._args.streams, found)}", flush=True)
        finally:
            for server in servers.values():
                server.close()

    def _start(self, name: str, config: str, servers: dict[str, ServerProcess]) -> None:
        """Start a server and wait for it; one that cannot is noted."""
        args = self._args
        try:
            model = model_for(home_of(name), "fp32", config, self._work, self._converter)
            plan = plan_server(
                name,
                model=model,
                peers=Path(args.peers_dir),
                link=self._link,
                threads=self._threads,
                sequences=args.streams,
                length=-(-(args.random_input_len + args.random_output_len + 1) // 64) * 64,
            )
            server = ServerProcess(plan, self._work / f"server-{name}.log")
        except ContestantError as error:
            self.failures.append(f"{config}: {error}")
            return
        try:
            server.wait_ready(START_SECONDS)
        except ContestantError as error:
            server.close()
            self.failures.append(f"{config}: {error}")
            return
        except BaseException:
            server.close()
            raise
        server.freeze()
        servers[name] = server

    def _converter(self, name: str) -> Contestant:
        python = python_of(name, Path(self._args.peers_dir))
        if python is None:
            raise ContestantError(f"{name}: not installed in {self._args.peers_dir}; `make peers` does that")
        sides = "troupellm.load_tests.peers.sides"
        environment = environment_of(name, python, self._link, self._threads)
        command = [str(python), "-m", f"{sides}.loop", f"{sides}.{SIDES[name]}"]
        return Contestant(name, command, environment=environment, log=self._work / f"{name}.log")

    def _turn(self, name: str, config: str, number: int, servers: dict[str, ServerProcess], measured: Measured) -> None:
        """Round 0 warms up. A server that fails is out, with what was measured of it before."""
        server, args = servers[name], self._args
        try:
            with server.awake():
                one = asyncio.run(_load(server, self._samples(config, args.one_requests, f"one {number}"), 1))
                many = asyncio.run(_load(server, self._samples(config, args.streams, f"many {number}"), args.streams))
        except ContestantError as error:
            self.failures.append(f"{config}: {error}")
            servers.pop(name).close()
            for column in (measured.itl_ms, measured.tpot_ms, measured.ttft_ms, measured.rate):
                column.clear()
            return
        if number:
            measured.itl_ms.append(one["itl_ms"])
            measured.tpot_ms.append(one["tpot_ms"])
            measured.ttft_ms.append(one["ttft_ms"])
            measured.rate.append(many["rate"])

    def _samples(self, config: str, count: int, seed: str) -> list[SampleRequest]:
        args = self._args
        cell = Cell("serve", count, args.random_input_len, args.random_output_len)
        prompts = cell.prompts(SHAPES[config].vocab_size, f"{args.seed} {seed}")
        return [SampleRequest(prompt=prompt, output_len=args.random_output_len) for prompt in prompts]

    def _write(self) -> None:
        if self._args.result_json:
            content = {
                "processor": processor(),
                "num_threads": self._threads,
                "rounds": self._args.rounds,
                "input_len": self._args.random_input_len,
                "output_len": self._args.random_output_len,
                "streams": self._args.streams,
                "one_requests": self._args.one_requests,
                "found": {
                    config: {name: {**msgspec.to_builtins(one), "medians": one.medians()} for name, one in rows.items()}
                    for config, rows in self.found.items()
                },
                "judgement": [{**msgspec.to_builtins(one), "kept": one.kept} for one in judge(self.found)],
                "failures": self.failures,
            }
            Path(self._args.result_json).write_text(json.dumps(content, indent=1), encoding="utf-8")


async def _load(server: ServerProcess, samples: list[SampleRequest], concurrency: int) -> dict[str, float]:
    """Run the samples, so many at a time.

    Raises:
        ContestantError: a request failed, or was answered with another number of tokens.
    """
    body: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **server.plan.body}
    target = Target.completions(server.url, model="model", body=body, timeout=RUN_SECONDS)
    result = await drive(
        target, samples, [0.0] * len(samples), max_concurrency=concurrency, ignore_eos=True, time_limit=RUN_SECONDS
    )
    if failed := [record.error for record in result.records if not record.ok]:
        raise ContestantError(f"{server.plan.name}: {len(failed)} requests failed: {failed[0]}")
    gaps = [gap for record in result.records for gap in record.itls]
    return {
        "itl_ms": 1e3 * median(gaps) if gaps else 0.0,
        "tpot_ms": 1e3 * median([record.tpot or 0.0 for record in result.records]),
        "ttft_ms": 1e3 * median([record.ttft for record in result.records]),
        "rate": sum(record.output_tokens for record in result.records) / result.duration,
    }


def judge(found: dict[str, dict[str, Measured]]) -> list[Judgement]:
    """Our server as it comes against the rivals: times on one model, tokens per second on each."""
    verdicts = []
    for config, rows in found.items():
        medians = {name: one.medians() for name, one in rows.items()}
        ours = medians.get(TROUPE, {})
        rivals = {name: medians[name] for name in RIVALS if medians.get(name)}
        if not ours or not rivals:
            continue
        missing = tuple(name for name in RIVALS if name not in rivals)
        if config == TIMED:
            if "llama" in rivals:
                ratio = ours["itl_ms"] / rivals["llama"]["itl_ms"]
                verdicts.append(Judgement(f"{config}: ITL of one stream / llama-server's", ratio, MOST_ITL, True))
            ratio = ours["ttft_ms"] / min(one["ttft_ms"] for one in rivals.values())
            verdicts.append(Judgement(f"{config}: TTFT of one stream / best rival's", ratio, 1.0, True, missing))
        ratio = ours["rate"] / max(one["rate"] for one in rivals.values())
        what = f"{config}: tokens/s of all streams / best rival's"
        verdicts.append(Judgement(what, ratio, LEAST_RATE, missing=missing))
    return verdicts


def table(config: str, streams: int, rows: dict[str, Measured]) -> str:
    head = f"{config:<16}{'TTFT ms':>10}{'ITL ms':>10}{'TPOT ms':>10}{f'{streams} streams, tokens/s':>26}"
    lines = [head]
    for name, one in rows.items():
        medians = one.medians()
        if medians:
            times = "".join(f"{medians[key]:>10.2f}" for key in ("ttft_ms", "itl_ms", "tpot_ms"))
            lines.append(f"{name:<16}{times}{medians['rate']:>26.1f}")
        else:
            lines.append(f"{name:<16}{'-':>10}{'-':>10}{'-':>10}{'-':>26}")
    return "\n".join(lines)


def judgement_text(verdicts: Sequence[Judgement]) -> str:
    return "\n".join(
        f"{one.what:<48}{one.found:>7.2f}x   wanted {'at most' if one.at_most else 'at least'} {one.wanted:.2f}x   "
        + ("kept" if one.kept else "not shown" if one.reached else "MISSED")
        + (f"; numbers MISSING of {', '.join(one.missing)}" if one.missing else "")
        for one in verdicts
    )
