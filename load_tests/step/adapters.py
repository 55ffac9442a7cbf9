"""Adapters with random numbers, a checkpoint with one of them merged, and decode steps with and without them."""

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

import msgspec
import torch
from safetensors.torch import load_file, save_file

from troupellm.load_tests.step.bare import BareWorker
from troupellm.models.adapters.sites import decoder_sites
from troupellm.models.load.architecture import describe_model
from troupellm.protocol.config.engine import EngineConfig

MODEL, SLOTS, ONE, MERGED, ALL = "the model alone", "empty slots", "one adapter", "one adapter, merged", "all adapters"
SIDES = (MODEL, SLOTS, ONE, MERGED, ALL)
_FILE = "adapter_model.safetensors"
_DEVIATION = 0.02


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of decode steps with so many rows, by side: the median of each round."""

    rows: int
    seconds: dict[str, list[float]]

    def rate(self, side: str) -> float:
        """Tokens per second."""
        return self.rows / median(self.seconds[side])

    def ratio(self, side: str, to: str) -> float:
        """Of tokens per second, the median of rounds."""
        return median(other / own for own, other in zip(self.seconds[side], self.seconds[to], strict=True))


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Of each measurement."""

    context: int
    """Tokens of each prompt."""
    steps: int
    rounds: int
    num_threads: int | None
    rank: int


def write_adapter(folder: Path, model: Path, rank: int, seed: int) -> Path:
    """An adapter of all projections with random numbers, in the form of PEFT's folders."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for site in decoder_sites(describe_model(model)):
        for part in site.parts if site.name != "head" else ():
            key = f"base_model.model.model.{part.module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, site.in_features, generator=generator) * _DEVIATION
            tensors[f"{key}.lora_B.weight"] = torch.randn(part.width, rank, generator=generator) * _DEVIATION
    save_file(tensors, folder / _FILE)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def write_merged(folder: Path, model: Path, adapter: Path) -> Path:
    """The model with an adapter of `write_adapter` in its weights."""
    shutil.copytree(model, folder)
    weights, tensors = load_file(folder / "model.safetensors"), load_file(adapter / _FILE)
    for name in (name for name in tensors if name.endswith(".lora_A.weight")):
        module = name.removesuffix(".lora_A.weight")
        base = weights[f"{module.removeprefix('base_model.model.')}.weight"]
        base += tensors[f"{module}.lora_B.weight"] @ tensors[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def measure(model: Path, merged: Path, adapters: Sequence[Path], batches: Sequence[int], shape: Shape) -> list[Steps]:
    """All sides in turns, so that each meets the same machine."""
    with ExitStack() as stack:
        plain, serving, whole = (
            stack.enter_context(closing(_worker(folder, shape, max(batches), slots)))
            for folder, slots in ((model, 0), (model, len(adapters)), (merged, 0))
        )
        serving.load_adapters(adapters)
        serving.fill(1, 4, 1)
        sides = {
            MODEL: (plain, 0),
            SLOTS: (serving, 0),
            ONE: (serving, 1),
            MERGED: (whole, 0),
            ALL: (serving, len(adapters)),
        }
        return [_measure(sides, rows, shape) for rows in batches]


def _measure(sides: dict[str, tuple[BareWorker, int]], rows: int, shape: Shape) -> Steps:
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(shape.rounds):
        for side in list(sides)[:: 1 if number % 2 else -1]:
            worker, adapters = sides[side]
            worker.fill(rows, shape.context, shape.steps + 2, adapters=adapters)
            seconds[side].append(worker.step_seconds(shape.steps))
    return Steps(rows=rows, seconds=seconds)


def _worker(folder: Path, shape: Shape, rows: int, slots: int) -> BareWorker:
    lora = {"enable_lora": True, "max_loras": slots, "max_lora_rank": shape.rank} if slots else {}
    config = EngineConfig.from_flat(
        {
            "model": str(folder),
            "device": "cpu",
            "num_threads": shape.num_threads,
            "max_num_seqs": rows,
            "max_model_len": 2 * (shape.context + shape.steps),
            **lora,
        }
    )
    return BareWorker(folder, config)
