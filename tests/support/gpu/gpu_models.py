"""The GPU script's models as a tiny one on a CPU, which their measures run on without a device."""

from pathlib import Path

import pytest
import torch

from troupellm.load_tests.gpu import engine
from troupellm.load_tests.kernels.ceilings import Measured
from troupellm.load_tests.random_model import SHAPES, write_random_model
from troupellm.load_tests.roofline import SIZES, ModelSize

CPU = torch.device("cpu")
CEILINGS = Measured(
    device="made up",
    read=1e12,
    copy=1e12,
    gemm_float32=1e14,
    gemm_bfloat16=1e14,
    gemm_fp8=2e14,
    to_device=1e11,
    to_host=1e11,
)
TINY = ModelSize(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=512)


def tiny_models(monkeypatch: pytest.MonkeyPatch, folder: Path) -> engine.Models:
    """Every model is the tiny one from now on."""
    model = write_random_model(folder / "model", SHAPES["tiny"])
    monkeypatch.setattr(engine, "write_model", lambda name, place: model)
    monkeypatch.setattr(engine, "CONTEXT", 16)
    monkeypatch.setattr(engine, "STEPS", 12)
    monkeypatch.setattr(engine, "ROUNDS", 2)
    for name in SIZES:
        monkeypatch.setitem(SIZES, name, TINY)
    settings = engine.Models.settings_of
    # Several threads would wait for each other beside other tests; and such a step is tried before anything is served.
    small = {"num_threads": 1, "max_num_batched_tokens": 256}
    monkeypatch.setattr(
        engine.Models, "settings_of", lambda self, *sizes, **more: settings(self, *sizes, **(small | more))
    )
    return engine.Models(CPU, CEILINGS, folder)
