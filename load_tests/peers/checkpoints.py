"""The random model of a benchmark in the form that each contestant reads best, made once per folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from troupellm.load_tests.peers.process import Contestant, ContestantError
from troupellm.load_tests.random_model import SHAPES, write_random_model

PREPARE_SECONDS = 1800.0
GGUF = "model.gguf"

Start = Callable[[str], Contestant]
"""Starts the named contestant's process, nothing loaded."""

PLAIN = "hf"


def model_for(contestant: str, precision: str, preset: str, folder: Path, start: Start) -> Path:
    """The path of `preset` for a contestant, written if it is not there yet.

    Raises:
        ContestantError: the contestant's own converter failed.
    """
    source = plain_model(preset, folder)
    if contestant == "vllm" and precision == "int8":
        return written(folder / preset / "compressed-int8", lambda target: write_compressed(source, target))
    if contestant in ("llama", "openvino"):
        name = {"llama": "gguf", "openvino": "ir"}[contestant]
        place = GGUF if contestant == "llama" else ""
        made = written(
            folder / preset / f"{name}-{precision}",
            lambda target: _convert(start(contestant), source, target / place, precision),
        )
        return made / place
    return source


def plain_model(preset: str, folder: Path) -> Path:
    """The checkpoint of `preset` as a Hugging Face folder, written if it is not there yet."""
    return written(folder / preset / PLAIN, lambda target: write_random_model(target, SHAPES[preset]))


def written(target: Path, write: Callable[[Path], object]) -> Path:
    """A folder that is whole if it is there at all."""
    if not target.exists():
        partial = target.with_name(target.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            write(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        partial.rename(target)
    return target


def _convert(contestant: Contestant, source: Path, target: Path, precision: str) -> None:
    try:
        settings = {"source": str(source), "target": str(target), "precision": precision}
        contestant.ask(PREPARE_SECONDS, do="prepare", settings=settings)
    finally:
        contestant.close()
    if not target.exists():
        raise ContestantError(f"{contestant.name}: wrote nothing at {target}")


def write_compressed(source: Path, target: Path) -> Path:
    """The checkpoint as compressed-tensors int8: weights per output channel, activations per token, no zero points."""
    import numpy as np
    from safetensors import safe_open
    from safetensors.numpy import save_file

    written = {}
    with safe_open(source / "model.safetensors", "numpy") as weights:
        for name in weights.keys():  # noqa: SIM118 (it is no mapping)
            tensor = weights.get_tensor(name)
            if not name.endswith("_proj.weight"):
                written[name] = tensor
                continue
            scale = np.maximum(np.abs(tensor).max(axis=1, keepdims=True), 1e-12) / np.float32(127)
            written[name] = np.rint(tensor / scale).astype(np.int8)
            written[f"{name}_scale"] = scale.astype(np.float32)
    save_file(written, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = _scheme()
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target / name)
    return target


def _scheme() -> dict[str, object]:
    arguments = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**arguments, "strategy": "channel", "dynamic": False},
                "input_activations": {**arguments, "strategy": "token", "dynamic": True},
            }
        },
    }
