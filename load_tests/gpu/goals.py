"""The goals by number: what is measured over what, and what is wanted."""

from collections.abc import Collection
from typing import Any

import msgspec


class Target(msgspec.Struct, frozen=True):
    """One number of a goal."""

    name: str
    wanted: float
    at_most: bool = False

    def kept(self, found: float) -> bool:
        return found <= self.wanted if self.at_most else found >= self.wanted


class Goal(msgspec.Struct, frozen=True):
    what: str
    """Of what over what its numbers are."""
    seconds: float
    """That it takes, roughly; it is not begun with less time left."""
    targets: tuple[Target, ...]
    needs: tuple[str, ...]
    """Operations that it times: where one of them is wrong, the goal's numbers would mean nothing."""
    shares: tuple[str, ...] = ()
    """Goals whose times are kept for it, ..."""
    seconds_behind: float = 0.0
    """... and what it takes where all of them were measured before."""

    def takes(self, measured: Collection[str]) -> float:
        """Seconds, behind these goals."""
        return self.seconds_behind if self.shares and set(self.shares) <= set(measured) else self.seconds


MODEL = (
    "linear", "rms_norm", "add_rms_norm", "rope_kv_write", "decode_attention", "prefill_attention", "silu_mul",
    "step_begin", "step_end",
)  # fmt: skip
"""The operations of a step of a dense model."""
FIRST = ("G8", "G5", "G3", "G1", "G13", "G16")
"""By default, in the order in which they are worth the time: all of them fit behind checks that take all of theirs."""
HOUR = (
    "G8", "G9", "G10", "G15", "G5", "G3", "G1", "G13", "G16", "G17", "G25", "G11", "G2", "G23", "G20", "G12", "G14",
    "G26", "G27", "G4", "G6", "G7", "G7b", "G18", "G19", "G21", "G22", "G24",
)  # fmt: skip
"""All of them, in the order in which they decide what to mend: kernels, the step, graphs, formats, the server."""
COUNTING = "G5"
"""Needs the number of kernels of a step."""
PROFILED = ("G12",)
"""Profile their process, whose launches may be slower for ever after."""

GOALS = {
    "G1": Goal(
        "engine decode, fraction of the roofline, Qwen3-8B bf16, 1k",
        90.0,
        tuple(Target(f"batch {batch}", 0.85) for batch in (1, 32, 256)),
        MODEL,
    ),
    "G2": Goal(
        "the same with fp8 weights",
        90.0,
        tuple(Target(f"batch {batch}", 0.75) for batch in (1, 32, 256)),
        (*MODEL, "linear_fp8", "row_codes"),
    ),
    "G3": Goal(
        "engine decode, fraction of the roofline, Qwen3-0.6B bf16, batch 1", 30.0, (Target("batch 1", 0.45),), MODEL
    ),
    "G4": Goal(
        "engine decode, fraction of the roofline, Qwen3-30B-A3B bf16",
        150.0,
        (Target("batch 1", 0.50), Target("batch 32", 0.70)),
        (*MODEL, "fused_moe"),
    ),
    "G5": Goal(
        "kernel tax of the decode graph, batch 1, us",
        50.0,
        (Target("8b", 1.7, True), Target("0.6b", 1.3, True)),
        MODEL,
    ),
    "G6": Goal(
        "least time of the public 256 requests over theirs, Qwen3-0.6B bf16, offline",
        60.0,
        (Target("ratio", 0.70),),
        MODEL,
    ),
    "G7": Goal(
        "least time of equal requests over theirs, Qwen3-8B bf16, offline",
        240.0,
        (Target("1k/1k", 0.85), Target("4k/4k", 0.85)),
        MODEL,
    ),
    "G7b": Goal(
        "the same, Llama-8B shapes, weights and cache fp8, 512 requests",
        240.0,
        (Target("1k/1k", 0.80), Target("2k/2k", 0.85)),
        (*MODEL, "linear_fp8", "row_codes"),
    ),
    "G8": Goal(
        "paged decode attention, fraction of the read ceiling",
        20.0,
        (Target("16 x 4k", 0.85), Target("64 x 4k", 0.85), Target("1 x 32k", 0.80)),
        ("decode_attention",),
    ),
    "G9": Goal(
        "attention, 1 x 128k and 31 x 4k over the same bytes evenly",
        20.0,
        (Target("ratio", 1.15, True),),
        ("decode_attention",),
    ),
    "G10": Goal(
        "prefill attention over torch's best SDPA backend, 8k",
        30.0,
        (Target("fresh", 0.70), Target("paged", 0.60)),
        ("prefill_attention",),
    ),
    "G11": Goal(
        "8B prefill through the engine over the GEMM ceiling", 60.0, (Target("2k", 0.78), Target("8k", 0.78)), MODEL
    ),
    "G12": Goal(
        "idle time of the device over all time, engine decode, batch 32, 1k",
        90.0,
        (Target("8b", 0.01, True), Target("0.6b", 0.03, True)),
        MODEL,
    ),
    "G13": Goal(
        "bare graph tokens/s over engine tokens/s",
        90.0,
        (
            *(Target(f"8b batch {batch}", 1.03, True) for batch in (1, 32, 256)),
            Target("0.6b batch 1", 1.10, True),
        ),
        MODEL,
        ("G1", "G3", "G5"),
        40.0,  # workers of 32 and 256 rows are left
    ),
    "G14": Goal(
        "HTTP tokens/s over engine tokens/s",
        150.0,
        (Target("8b batch 64", 0.97), Target("0.6b batch 256", 0.85)),
        MODEL,
    ),
    "G15": Goal(
        "draw over the head's product",
        20.0,
        (
            Target("plain, batch 1", 0.10, True),
            Target("plain, batch 256", 0.10, True),
            Target("top-p, batch 1", 0.35, True),
            Target("top-p, batch 256", 0.35, True),
        ),
        ("linear", "sampling", "truncated_sampling"),
    ),
    "G16": Goal(
        "engine tokens/s over transformers'",
        110.0,
        (Target("0.6b generate", 15.0), Target("8b generate", 4.0), Target("8b generate_batch 32", 2.0)),
        MODEL,
        ("G1", "G3"),
        70.0,  # transformers alone is left
    ),
    "G17": Goal(
        "capturing the graphs of all default sizes up to 256 rows, 8B",
        60.0,
        (Target("seconds", 8.0, True), Target("GiB", 0.5, True)),
        MODEL,
    ),
    "G18": Goal(
        "first token of a cached prompt of 8k over that of a new one, 8B",
        60.0,
        (Target("ratio", 0.06, True),),
        MODEL,
    ),
    "G19": Goal(
        "8B cache from host memory: GB/s over a pinned copy's; share of throughput lost with no hits",
        150.0,
        (Target("restored", 0.85), Target("lost", 0.01, True)),
        MODEL,
    ),
    "G20": Goal(
        "8B graph of five tokens per row over one of one token; tokens/s with drafts, 3 of a step kept, over without",
        120.0,
        (
            Target("verify, batch 1", 1.06, True),
            Target("verify, batch 32", 1.20, True),
            Target("speed-up, batch 1", 2.6),
        ),
        MODEL,
    ),
    "G21": Goal(
        "time per token with a JSON grammar over without, 8B",
        90.0,
        (Target("batch 1", 1.02, True), Target("batch 32", 1.05, True)),
        MODEL,
    ),
    "G22": Goal(
        "batch-invariant step over the normal one, 8B, batch 32",
        60.0,
        (Target("ratio", 1.20, True),),
        (*MODEL, "linear_invariant"),
    ),
    "G23": Goal("fp8 cache step over the bf16 one, 8B, batch 32, 8k", 90.0, (Target("ratio", 0.72, True),), MODEL),
    "G24": Goal(
        "step of 64 rows behind a common prefix of 8k over theirs without it, 8B, 1k each",
        60.0,
        (Target("ratio", 1.4, True),),
        MODEL,
    ),
    "G25": Goal("cache tokens over what the free memory holds, 8B", 60.0, (Target("share", 0.97),), MODEL),
    "G26": Goal(
        "least time of a prompt over an idle server's first token through HTTP, 8B",
        90.0,
        (Target("128", 0.55), Target("1k", 0.72), Target("8k", 0.78)),
        MODEL,
    ),
    "G27": Goal(
        "32 streams of 8B, 8k prompts each second: p99 of gaps over p50; prompts' rate over unchunked",
        90.0,
        (Target("p99 / p50", 4.0, True), Target("prompts' rate", 0.9)),
        MODEL,
    ),
}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a goal."""

    goal: str
    what: str
    found: dict[str, float]
    details: dict[str, Any]
    kept: dict[str, bool]
    skipped: str = ""
    """Why there is nothing, or not all of it."""
    failed: bool = False
    """It broke; else what is skipped was refused by name."""
    seconds: float = 0.0
    """That it took."""


def judged(
    name: str,
    found: dict[str, float],
    details: dict[str, Any],
    skipped: str = "",
    *,
    failed: bool = False,
    seconds: float = 0.0,
) -> Result:
    goal = GOALS[name]
    kept = {target.name: target.kept(found[target.name]) for target in goal.targets if target.name in found}
    return Result(
        goal=name,
        what=goal.what,
        found=found,
        details=details,
        kept=kept,
        skipped=skipped,
        failed=failed,
        seconds=seconds,
    )


def text(result: Result) -> str:
    lines = [f"{result.goal:<4} {result.what}" + (f": SKIPPED, {result.skipped}" if result.skipped else "")]
    for target in GOALS[result.goal].targets:
        if target.name in result.found:
            verdict = "kept" if result.kept[target.name] else "MISSED"
            wanted = f"{'at most' if target.at_most else 'at least'} {target.wanted:g}"
            lines.append(f"     {target.name:<24}{result.found[target.name]:>10.3f}   wanted {wanted:<14}{verdict}")
    return "\n".join(lines)
