"""The mover of blocks between a GPU and the host, with a processor in its place."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_model import write_tiny_model

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.registry import describe_decoder
from troupellm.models.kv_offload import gpu_mover
from troupellm.models.kv_offload.block_copy import Move, block_views, bytes_of_block
from troupellm.models.kv_offload.gpu_mover import MOST_BLOCKS, PIECE, CudaMover
from troupellm.models.kv_offload.host_memory import HostBuffer
from troupellm.models.kv_offload.host_tier import BATCH
from troupellm.protocol.messages.kv_transfers import STORES

BLOCKS, SIZE = STORES + 1, 4


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of whose work is done when it is asked for."""
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    stream = SimpleNamespace(wait_event=lambda event: None)
    for name, value in {
        "Stream": lambda device: stream,
        "Event": lambda **_: event,
        "stream": lambda stream: torch.inference_mode(),
        "current_stream": lambda device: stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


@pytest.fixture
def cache(tmp_path: Path) -> KVCache:
    config = describe_decoder(ConfigReader.load(write_tiny_model(tmp_path / "tiny")))
    cache = KVCache(config, BLOCKS, SIZE, torch.float32)
    for view in block_views(cache):
        view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))
    return cache


def test_blocks_come_back_whole_and_copies_on_the_device_go_as_they_are_stored(cuda: None, cache: KVCache) -> None:
    size = bytes_of_block(cache)
    host_buffer = HostBuffer(STORES, size)
    mover = CudaMover(cache, host_buffer)
    blocks = list(range(STORES, 0, -1))
    begun = mover.begin_stores(blocks)
    assert held(begun) == STORES * size
    before = [view.clone() for view in block_views(cache)]
    for view in block_views(cache):
        view.zero_()  # a step may write at once
    for begin in range(0, STORES, BATCH):
        moves = [Move(index, blocks[index], index) for index in range(begin, begin + BATCH)]
        mover.store(begun, moves)
        assert held(begun) <= (STORES - begin - BATCH + PIECE) * size <= MOST_BLOCKS * size
        mover.load(moves)
    for view, expected in zip(block_views(cache), before, strict=True):
        assert torch.equal(view[:, 1:], expected[:, 1:])


def test_a_gather_leaves_nothing_beside_what_it_gives(
    cuda: None, cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    select = torch.Tensor.index_select

    def watched(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        nonlocal made
        found = select(self, dim, index)
        made += found.nbytes
        assert found.is_contiguous()
        return found

    monkeypatch.setattr(torch.Tensor, "index_select", watched)
    begun = CudaMover(cache, HostBuffer(1, 1)).begin_stores(range(PIECE + 1))
    assert made == held(begun) == (PIECE + 1) * bytes_of_block(cache)


@pytest.mark.parametrize("kind", ["store", "load"])
def test_what_was_begun_is_done_before_a_failure_is_told(
    kind: str, cuda: None, cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler reuses the blocks and places after the report."""
    copies, waits = list[torch.Tensor](), list[int]()
    copy = torch.Tensor.copy_

    def failing(self: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        if copies:
            raise RuntimeError("no more copies")
        copies.append(self)
        return copy(self, source, non_blocking)

    def note() -> None:
        waits.append(len(copies))

    host_buffer = HostBuffer(2, bytes_of_block(cache))
    mover = CudaMover(cache, host_buffer)
    begun = mover.begin_stores([1, 2])
    monkeypatch.setattr(torch.Tensor, "copy_", failing)
    monkeypatch.setattr(torch.cuda.Event(), "synchronize", note)
    moves = [Move(0, 1, 0), Move(1, 2, 1)]
    with pytest.raises(RuntimeError, match="no more copies"):
        mover.store(begun, moves) if kind == "store" else mover.load(moves)
    assert waits == [1]


def held(begun: gpu_mover.Gathered) -> int:
    return sum(part.untyped_storage().nbytes() for piece in begun.pieces for part in piece)
