"""`bench lora`: decode steps with adapters, beside steps of the model alone."""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

import msgspec
import torch
from safetensors.torch import save_file

from troupellm.load_tests.random_model import SHAPES, write_random_model
from troupellm.load_tests.step.bare import BareWorker
from troupellm.models.adapters.sites import decoder_sites
from troupellm.models.load.architecture import describe_model
from troupellm.protocol.config.engine import EngineConfig

MODEL, SLOTS, ONE, ALL = "the model alone", "with empty slots", "one adapter", "all adapters"
BARS = {SLOTS: 0.98, ALL: 0.9}
"""Least ratio of tokens/s to those of the model alone; the second one at 32 rows and 8 adapters of rank 16."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One side at one batch size."""

    batch: int
    side: str
    tokens_per_second: float
    ratio: float
    """To the model alone, the median of rounds."""


def run(args: argparse.Namespace) -> int:
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="troupe-lora-") as name:
        folder = write_random_model(Path(name) / "model", SHAPES[args.model])
        adapters = [write_adapter(Path(name) / str(seed), folder, args.rank, seed) for seed in range(args.adapters)]
        workers = {lora: worker(folder, args, lora=lora) for lora in (False, True)}
        workers[True].load_adapters(adapters)
        workers[True].fill(1, 4, 1)
        print(f"{'batch':>5}  {'side':<18}{'tokens/s':>10}{'ratio':>8}", flush=True)
        for batch in args.batches:
            for cell in measure(workers, args, batch):
                cells.append(cell)
                print(f"{batch:>5}  {cell.side:<18}{cell.tokens_per_second:>10.1f}{cell.ratio:>8.3f}", flush=True)
    if args.result_json:
        Path(args.result_json).write_text(json.dumps([msgspec.structs.asdict(cell) for cell in cells], indent=1))
    missed = [cell for cell in cells if cell.ratio < BARS.get(cell.side, 0.0) and (cell.side == SLOTS or batch >= 32)]
    for cell in missed:
        print(f"missed: {cell.side} at {cell.batch} rows, {cell.ratio:.3f} of at least {BARS[cell.side]:.2f}")
    return 0


def worker(folder: Path, args: argparse.Namespace, *, lora: bool) -> BareWorker:
    """lora: with slots for all adapters."""
    slots = {"enable_lora": True, "max_loras": args.adapters, "max_lora_rank": args.rank} if lora else {}
    config = EngineConfig.from_flat(
        {
            "model": str(folder),
            "device": "cpu",
            "num_threads": args.num_threads,
            "max_num_seqs": max(args.batches),
            "max_model_len": 2 * (args.context + args.steps),
            **slots,
        }
    )
    return BareWorker(folder, config)


def measure(workers: dict[bool, BareWorker], args: argparse.Namespace, batch: int) -> list[Cell]:
    """All sides in turns, so that each meets the same machine."""
    sides = {MODEL: (False, 0), SLOTS: (True, 0), ONE: (True, 1), ALL: (True, args.adapters)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(args.rounds):
        for side, (lora, adapters) in sides.items():
            workers[lora].fill(batch, args.context, args.steps + 2, adapters=adapters)
            seconds[side].append(workers[lora].step_seconds(args.steps))
    return [
        Cell(
            batch=batch,
            side=side,
            tokens_per_second=batch / median(found),
            ratio=median(alone / one for alone, one in zip(seconds[MODEL], found, strict=True)),
        )
        for side, found in seconds.items()
    ]


def write_adapter(folder: Path, model: Path, rank: int, seed: int) -> Path:
    """An adapter of all projections with random numbers, in the form of PEFT's folders."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for site in decoder_sites(describe_model(model)):
        for part in site.parts if site.name != "head" else ():
            key = f"base_model.model.model.{part.module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, site.in_features, generator=generator) * 0.02
            tensors[f"{key}.lora_B.weight"] = torch.randn(part.width, rank, generator=generator) * 0.02
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder
