"""The whole contents of a block are moved, byte for byte, for every kind of cache; and nothing else is."""

from pathlib import Path

import msgspec
import pytest
import torch

from troupellm.models.batch.kv_cache import KVCache
from troupellm.models.config.decoder_config import DecoderConfig, MlaConfig
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.registry import describe_decoder
from troupellm.models.kv_offload.block_copy import MemoryMover, Move, block_views, bytes_of_block
from troupellm.models.kv_offload.host_memory import HostBuffer
from troupellm.models.memory.plan import block_bytes
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model

BLOCKS, SIZE = 9, 4


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> DecoderConfig:
    folder = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    return describe_decoder(ConfigReader.load(folder))


def with_groups(config: DecoderConfig) -> DecoderConfig:
    longer = msgspec.structs.replace(config, layers=config.layers[:1] * 5, hybrid_cache=True)
    return longer.with_layers(window=(8, 8, None, 8, 8))


def latent(config: DecoderConfig) -> DecoderConfig:
    mla = MlaConfig(latent=24, plain=8, rotated=8, value=8, query_latent=None)
    return msgspec.structs.replace(config, mla=mla).with_layers(num_kv_heads=1, head_dim=32)


def filled(config: DecoderConfig, dtype: torch.dtype, drafter: DecoderConfig | None) -> KVCache:
    cache = KVCache(config, BLOCKS, SIZE, dtype, drafter=drafter)
    for number, view in enumerate(block_views(cache)):
        view.copy_(
            torch.randint(0, 256, view.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
        )
    return cache


def everything(cache: KVCache, block: int) -> list[torch.Tensor]:
    """As layers see it."""
    pairs = [*cache.layers, *cache.draft_layers]
    return [part[block].view(torch.uint8).clone() for pair in pairs for part in pair]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", ["plain", "groups", "latent", "drafter"])
def test_a_block_comes_back_whole(plain: DecoderConfig, kind: str, dtype: torch.dtype) -> None:
    config = {"groups": with_groups, "latent": latent}.get(kind, lambda given: given)(plain)
    narrow = msgspec.structs.replace(plain, layers=plain.layers[:1]).with_layers(head_dim=16, num_kv_heads=1)
    drafter = narrow if kind == "drafter" else None
    cache = filled(config, dtype, drafter)
    size = block_bytes(config, SIZE, dtype) + (0 if drafter is None else block_bytes(drafter, SIZE, dtype))
    assert bytes_of_block(cache) == size
    host_buffer = HostBuffer(4, size)
    mover = MemoryMover(cache, host_buffer)
    before = [everything(cache, block) for block in range(BLOCKS)]
    assert any(not torch.equal(one, other) for one, other in zip(before[2], before[6], strict=True))
    mover.begin_stores([2, 6])
    assert mover.is_storing
    mover.store(None, [Move(0, 2, 3), Move(1, 6, 0)])
    assert not mover.is_storing
    mover.load([Move(0, 8, 3), Move(1, 1, 0)])
    expected = [*before]
    expected[8], expected[1] = before[2], before[6]
    for block in range(BLOCKS):
        assert all(torch.equal(*each) for each in zip(everything(cache, block), expected[block], strict=True)), block


def test_a_failed_store_holds_nobody_up(plain: DecoderConfig) -> None:
    cache = filled(plain, torch.float32, None)
    mover = MemoryMover(cache, HostBuffer(2, bytes_of_block(cache)))
    mover.begin_stores([1, 2, 1])
    with pytest.raises(IndexError):
        mover.store(None, [Move(0, 1, 0), Move(1, 2, 7), Move(2, 1, 1)])
    mover.settle()
    assert not mover.is_storing


def test_the_arena_gives_its_memory_back(tmp_path: Path) -> None:
    host_buffer = HostBuffer(3, 100)
    host_buffer[1][:] = 7
    assert host_buffer.tensor(1).tolist() == [7] * 100
    host_buffer.release()
    with pytest.raises(IndexError):
        host_buffer[1]
    host_buffer.reserve()
    assert host_buffer[2].shape == (100,)
