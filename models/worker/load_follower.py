"""Loads the part of a model that a rank beside the leader has."""

from pathlib import Path

import msgspec

from troupellm.kernels import paged_attention
from troupellm.models.checkpoint.safetensors import unchanged
from troupellm.models.load.architecture import open_config
from troupellm.models.parallel.decoder import DividedDecoder
from troupellm.models.parallel.orders import Order, Sizes
from troupellm.models.parallel.ranks import Ranks
from troupellm.models.quantization.stated import settle_quantization
from troupellm.models.runner.leading import FollowingRunner
from troupellm.models.runner.placement import CpuPlace
from troupellm.models.worker.loader import ModelPlan
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.worker import LoadProgress


def load_follower(folder: Path, config: EngineConfig, ranks: Ranks) -> FollowingRunner:
    """Read this rank's part, and take as many KV blocks as the leader.

    Raises:
        ModelLoadError: the checkpoint cannot be read, or differs from the leader's.
        RankLost: another rank has ended.
    """
    ranks.join()
    told = Sizes.decode(Order(ranks.hear()))
    cache = msgspec.structs.replace(config.cache, num_gpu_blocks_override=told.num_blocks)
    config = msgspec.structs.replace(config, cache=cache)
    with unchanged(folder):
        reader, config = settle_quantization(folder, open_config(folder, _silent), config)
        place = CpuPlace(config, ranks)
        plan = ModelPlan.of(folder, reader, config, place, _silent)
        found = Sizes(plan.budget.num_blocks, plan.budget.max_model_len)
        if found != told:
            raise ModelLoadError(f"rank {ranks.number} has {found}, the leader has {told}: they read other models")
        decoder = plan.read(_silent)
    assert isinstance(decoder, DividedDecoder)
    kv_cache = place.make_cache(plan.model, plan.budget.num_blocks, plan.cached)
    paged_attention.prepare()
    runner = FollowingRunner(
        decoder, kv_cache, ranks, max_model_len=told.max_model_len, backend=config.worker.attention_backend
    )
    ranks.meet()
    return runner


def _silent(_: LoadProgress) -> None:
    """The leader tells the load's progress."""
