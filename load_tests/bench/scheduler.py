"""`bench scheduler`: CPU time of one scheduling step and of one admission, beside the whole actor chain."""

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec

from troupellm.load_tests.contestants.scheduler import AdmissionCost, Drafts, StepCost, admission_cost, step_cost

STEP_BUDGETS_US = {256: 250.0, 1024: 1000.0}
ADMISSION_BUDGETS_US = {"cached": 500.0, "cold": 2000.0}
BUDGET_PROMPT = 8192
FLUSH_MS = 20.0


def run(args: argparse.Namespace) -> int:
    report: dict[str, Any] = {"steps": {}, "admission": {}, "chain": {}}
    print("one scheduling step, prefix cache on: microseconds of CPU")
    print(f"{'running':>8}{'plan':>10}{'update':>10}{'step':>10}{'budget':>10}{'':>9}{'chain':>10}")
    for running in args.running:
        cost = step_cost(running, args.window_steps, args.windows)
        report["steps"][running] = {**msgspec.structs.asdict(cost), "total": cost.total}
        chain = None if args.no_chain else _chain(running)
        report["chain"][running] = chain
        print(_step_line(running, cost, chain), flush=True)
    if args.drafts:
        report["drafts"] = _drafting(args)
    print("chain: a step of the whole actor chain, readers and worker thread included (bench chain, 20 ms flush)\n")
    print(f"admission of {args.prompt_tokens:,} tokens: microseconds of CPU")
    print(f"{'':>8}{'submit':>10}{'plan':>10}{'update':>10}{'total':>10}{'budget':>10}{'':>9}{'hashing apart':>16}")
    for kind in ("cold", "cached"):
        admission = admission_cost(args.prompt_tokens, args.admissions, cached=kind == "cached")
        report["admission"][kind] = {**msgspec.structs.asdict(admission), "total": admission.total}
        print(_admission_line(kind, admission, args.prompt_tokens), flush=True)
    if args.against_vllm:
        from troupellm.load_tests.contestants.vllm_scheduler import report as report_vllm

        report["vllm"] = report_vllm(args)
    if args.result_json:
        Path(args.result_json).write_text(json.dumps(report), encoding="utf-8")
    return 0


def _drafting(args: argparse.Namespace) -> dict[str, dict[int, float]]:
    """The cost of speculative rows beside plain ones: without room for drafts, with room, and with some accepted."""
    ways: dict[str, Drafts | None] = {
        "off": None,
        "limits 0": Drafts(),
        "none drafted": Drafts(args.drafts),
        "some accepted": Drafts(args.drafts, args.drafts),
    }
    print(f"\nthe same with {args.drafts} drafts: microseconds of CPU\n{'running':>8}", end="")
    print("".join(f"{way:>15}" for way in ways))
    report: dict[str, dict[int, float]] = {way: {} for way in ways}
    for running in args.running:
        for way, drafts in ways.items():
            report[way][running] = step_cost(running, args.window_steps, args.windows, drafts).total
        print(f"{running:>8}" + "".join(f"{report[way][running]:>15.1f}" for way in ways), flush=True)
    print()
    return report


def _step_line(running: int, cost: StepCost, chain: float | None) -> str:
    shown = "" if chain is None else f"{chain:>10.1f}"
    verdict = _verdict(STEP_BUDGETS_US.get(running), cost.total)
    return f"{running:>8}{cost.plan:>10.1f}{cost.update:>10.1f}{cost.total:>10.1f}{verdict}{shown}"


def _admission_line(kind: str, cost: AdmissionCost, length: int) -> str:
    verdict = _verdict(ADMISSION_BUDGETS_US[kind] if length == BUDGET_PROMPT else None, cost.total)
    parts = f"{cost.submit:>10.1f}{cost.plan:>10.1f}{cost.update:>10.1f}{cost.total:>10.1f}"
    return f"{kind:>8}{parts}{verdict}{cost.hashing:>16.1f}"


def _verdict(budget: float | None, cost: float) -> str:
    return " " * 19 if budget is None else f"{budget:>10.0f}{'   kept  ' if cost <= budget else '   MISSED'}"


def _chain(running: int) -> float:
    """Wall time of a step of the chain, microseconds."""
    from troupellm.load_tests.bench.chain import chain_total

    return chain_total(running, FLUSH_MS)
