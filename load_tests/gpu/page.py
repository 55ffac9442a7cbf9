"""The page of a GPU session: its report as Markdown, for reading and for the record."""

from collections.abc import Iterator, Mapping
from typing import Any

from troupellm.load_tests.gpu.goals import GOALS


def page(report: Mapping[str, Any]) -> str:
    """A session's report (the JSON of `session.Session`) as one page: machine, correctness, goals, gaps."""
    return "\n".join(("# GPU session", "", *_machine(report), *_correctness(report), *_goals(report), ""))


def _machine(report: Mapping[str, Any]) -> Iterator[str]:
    facts = report.get("machine", {})
    yield f"Device: {report.get('device', 'unknown')}. " + ", ".join(
        f"{name} {version}" for name, version in report.get("versions", {}).items()
    )
    for name in ("compiler", "headers", "locked_memory", "missing"):
        if name in facts:
            yield f"- {name.replace('_', ' ')}: {facts[name]}"
    if "launch" in facts:
        yield f"- first kernel: {facts['launch'] or 'ran'}"
    for mode, told in report.get("tokens", {}).items():
        yield f"- greedy tokens of the built-in model {mode}: {told}"
    for when in ("before", "after"):
        if f"ceilings {when}" in report:
            yield f"- ceilings {when}: {report[f'ceilings {when}']} ({report.get(f'clocks {when}', 'no clocks')})"
    yield ""


def _correctness(report: Mapping[str, Any]) -> Iterator[str]:
    checked = report.get("correctness")
    yield "## Correctness"
    yield ""
    if checked is None:
        yield "Not checked."
    else:
        yield f"{len(checked['worst'])} operations have a verdict, {len(checked['wrong'])} of them are wrong."
        yield from (f"- {operation} is wrong: {'; '.join(cases)}" for operation, cases in checked["wrong"].items())
        yield from (f"- {operation} cannot be checked: {why}" for operation, why in checked["broken"].items())
        if checked["late"]:
            yield f"- not checked in time: {', '.join(checked['late'])}"
    yield ""


def _goals(report: Mapping[str, Any]) -> Iterator[str]:
    results = {result["goal"]: result for result in report.get("goals", ())}
    yield from ("## Goals", "", "| goal | number | found | wanted | |", "|---|---|--:|---|---|")
    for name, goal in GOALS.items():
        found = results[name]["found"] if name in results else {}
        for target in goal.targets:
            if target.name in found:
                verdict = "kept" if target.kept(found[target.name]) else "missed"
                wanted = f"{'at most' if target.at_most else 'at least'} {target.wanted:g}"
                yield f"| {name} | {target.name} | {found[target.name]:.3f} | {wanted} | {verdict} |"
    skipped = [f"- {name}: {result['skipped']}" for name, result in results.items() if result["skipped"]]
    owed = [name for name in GOALS if name not in results]
    if skipped:
        yield from ("", "Without all of their numbers:", "", *skipped)
    if owed:
        yield from ("", f"Owed: {', '.join(owed)}.")
