"""Memory that graphs read and write is in the plan before it is taken, and is no more than steps can use."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_heads import write_drafters

from tests.support.faked_gpu import CUDA, absent_gpu
from tests.support.tensor_attention import plan_tensors
from troupellm.models.gpu import placement
from troupellm.models.gpu.graph_dispatch import useful_sizes
from troupellm.models.gpu.runner import CudaRunner
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig

pytest.importorskip("triton")
from troupellm.kernels.sampling.triton_truncate import row_bytes, truncated_triton


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_drafters(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(autouse=True)
def triton(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention that graphs go with."""
    monkeypatch.setattr(
        placement, "plan_attention", lambda *_, **__: SimpleNamespace(backend=SimpleNamespace(name="triton"))
    )
    monkeypatch.setattr(placement, "triton_planner", lambda *_, **__: plan_tensors)


def loaded(home: Path, **settings: Any) -> tuple[CudaRunner, int]:
    """A runner, and what was planned beside weights and cache."""
    common = {"max_model_len": 64, "block_size": 16, "max_num_seqs": 6, "max_num_batched_tokens": 64}
    worker = ModelWorker(home / "target")
    config = EngineConfig.from_flat({"model": str(home / "target"), "dtype": "float32", **common, **settings})
    ready = worker.load(config, lambda progress: None)
    runner = worker.runner
    assert isinstance(runner, CudaRunner)
    worker.close()
    return runner, ready.activation_bytes


@pytest.mark.parametrize("method", ["", "ngram", "draft_model", "eagle", "eagle3", "medusa"])
def test_what_graphs_write_to_is_planned(home: Path, method: str) -> None:
    wanted: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method != "ngram":
        wanted["model"] = str(home / ("target" if method == "draft_model" else method))
    settings = {"speculative_config": wanted} if method else {}
    runner, planned = loaded(home, **settings)
    _, eager = loaded(home, **settings, enforce_eager=True)
    graphs, angles = runner.graphs, runner.decoder.angle_table
    assert angles is not None
    assert graphs._logits.shape[0] == (8 if not method else 32)
    assert (graphs._aux_layers.nbytes > 0) == (method in ("eagle", "eagle3", "medusa"))
    kept = sum(part.nbytes for part in (graphs._logits, graphs._aux_layers, graphs.columns, angles))
    drawing = 0 if method else 8 * row_bytes(runner.decoder.config.vocab_size)
    assert planned - eager == kept + drawing


@pytest.mark.parametrize("vocab", [300, 151_936])
def test_what_drawing_from_the_likeliest_tokens_takes_is_no_more_than_planned(vocab: int) -> None:
    with absent_gpu() as launches:
        given = torch.empty(3, vocab, device=CUDA), *(torch.empty(3, dtype=torch.int64, device=CUDA) for _ in range(2))
        truncated_triton(*given, torch.empty(vocab, dtype=torch.int32, device=CUDA), streams=given[1], ends=given[1])
        taken = {id(part): part for one in launches for part in one.arguments if isinstance(part, torch.Tensor)}
    own = sum(part.nbytes for part in taken.values() if part.shape[0] == 3 and not any(part is one for one in given))
    assert own == 3 * row_bytes(vocab)


def test_no_graph_has_more_rows_than_there_are(home: Path) -> None:
    runner, _ = loaded(home, cudagraph_capture_sizes=(2, 100_000))
    assert runner.graphs._logits.shape[0] == 6
    assert {key.requests for key in runner.graphs.dispatcher._possible} == {2, 6}


@pytest.mark.parametrize(
    ("wanted", "most", "sizes"),
    [((), 4, ()), ((1, 8), 8, (1, 8)), ((64, 2), 8, (2, 8)), ((16, 100, 12), 12, (12,)), ((2,), 8, (2,))],
)
def test_useful_sizes(wanted: tuple[int, ...], most: int, sizes: tuple[int, ...]) -> None:
    assert useful_sizes(wanted, most) == sizes
