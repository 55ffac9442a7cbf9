"""`bench forks`: several answers as forks of one prompt, and as the beams of one search, beside independent requests.

Independent requests are sent all at once, and the prefix cache is off: what is measured is the sharing of blocks.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import anyio

from troupellm.load_tests.contestants.forks import Arm, Work, compete, settings_of, transformers_search
from troupellm.load_tests.contestants.workload import usable_cores
from troupellm.load_tests.random_model import SHAPES, write_random_model
from troupellm.models.hub.source import BUILTIN_FOLDER


def run(args: argparse.Namespace) -> int:
    """1 when the first fork has other tokens than the request with its seed."""
    if args.against_transformers and find_spec("transformers") is None:
        print("bench forks: transformers comes with the test tools (make test)", file=sys.stderr)
        return 2
    threads = args.num_threads or usable_cores()
    with _folder(args.preset) as folder:
        backend = {"use_uvloop": find_spec("uvloop") is not None}
        arms = anyio.run(_measure, args, folder, threads, backend_options=backend)
    report = summarise(arms)
    print(f"{args.preset}, float32, {threads} threads: {args.prompt_len} tokens in, {args.output_len} out")
    print(table(report))
    if args.result_json:
        content = {"preset": args.preset, "num_threads": threads, "repeats": args.repeats, **report}
        Path(args.result_json).write_text(json.dumps(content), encoding="utf-8")
    return 0 if report["same_first_fork"] else 1


@contextmanager
def _folder(preset: str) -> Iterator[Path]:
    if preset == "builtin":
        yield BUILTIN_FOLDER
        return
    with tempfile.TemporaryDirectory(prefix="troupe-forks-") as name:
        yield write_random_model(Path(name) / "model", SHAPES[preset])


async def _measure(args: argparse.Namespace, folder: Path, threads: int) -> dict[str, Arm]:
    from troupellm.actors.engine.engine import Engine

    forks, beams = args.forks, args.beams
    settings = settings_of(args.prompt_len, args.output_len, max(forks, beams))
    settings |= {"num_threads": threads, "worker_process": not args.embedded}
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine(folder, **settings))
        work = Work(engine, args.prompt_len, args.output_len)
        arms = {
            "forks": Arm(f"{forks} forks", partial(work.forks, forks), forks),
            "requests": Arm(f"{forks} requests", partial(work.requests, forks), forks),
            "beams": Arm(f"{beams} beams", partial(work.beams, beams), beams),
            "requests_as_beams": Arm(f"{beams} requests, as many as beams", partial(work.requests, beams), beams),
        }
        if args.against_transformers:
            search = await transformers_search(folder, work.prompt, args.output_len, beams, threads, stack)
            arms["transformers"] = Arm(f"{beams} beams of transformers", search, beams, ours=False)
        await compete(engine, list(arms.values()), args.repeats, args.output_len)
    return arms


RATIOS = (("requests", "forks"), ("requests_as_beams", "beams"), ("transformers", "beams"))
"""Whose seconds and blocks are so many times the other one's."""


def summarise(arms: dict[str, Arm]) -> dict[str, Any]:
    """Ratios of times are medians over the rounds' own, which share the machine's mood."""
    ratios = {}
    for theirs, ours in RATIOS:
        if theirs in arms:
            one, other = arms[theirs], arms[ours]
            ratios[f"{theirs} / {ours}"] = {
                "names": [one.name, other.name],
                "seconds": median(slow / quick for slow, quick in zip(one.seconds, other.seconds, strict=True)),
                "peak_blocks": one.peak_blocks / other.peak_blocks if one.peak_blocks and other.peak_blocks else None,
            }
    same_beams = None
    if "transformers" in arms:
        pairs = zip(arms["beams"].answers, arms["transformers"].answers, strict=True)
        same_beams = [ours == theirs for ours, theirs in pairs]
    return {
        "arms": {
            name: {
                "name": arm.name,
                "median_s": arm.median_seconds,
                "seconds": arm.seconds,
                "peak_blocks": arm.peak_blocks,
            }
            for name, arm in arms.items()
        },
        "ratios": ratios,
        "same_first_fork": arms["forks"].answers[0] == arms["requests"].answers[0],
        "same_beams_as_transformers": same_beams,
    }


def table(report: dict[str, Any]) -> str:
    lines = [f"{'':<36}{'median s':>10}{'least':>9}{'most':>9}{'peak blocks':>13}"]
    for arm in report["arms"].values():
        blocks = "-" if arm["peak_blocks"] is None else arm["peak_blocks"]
        seconds = arm["seconds"]
        lines.append(f"{arm['name']:<36}{arm['median_s']:>10.3f}{min(seconds):>9.3f}{max(seconds):>9.3f}{blocks:>13}")
    for ratio in report["ratios"].values():
        blocks = "" if ratio["peak_blocks"] is None else f", {ratio['peak_blocks']:.2f}x the blocks"
        one, other = ratio["names"]
        lines.append(f"{one} / {other}: {ratio['seconds']:.2f}x the time{blocks}")
    same = "the tokens" if report["same_first_fork"] else "OTHER TOKENS than those"
    lines.append(f"the first fork has {same} of the request with its seed")
    if (same_beams := report["same_beams_as_transformers"]) is not None:
        lines.append(f"{sum(same_beams)} of {len(same_beams)} beams are those of transformers")
    return "\n".join(lines)
