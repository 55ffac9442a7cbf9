"""Settings that models with states do not go with yet."""

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.layers.states import has_states
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError


def check_states(model: DecoderConfig, config: EngineConfig, *, on_gpu: bool) -> None:
    """
    Raises:
        ConfigError: the model has states beside its KV cache, and a setting does not go with them.
    """
    if not has_states(model):
        return
    name = model.architecture
    if on_gpu:
        raise ConfigError(f"{name} has states, which run on a CPU alone so far; set device to cpu", param="device")
    interval, size = config.scheduler.state_snapshot_interval, config.cache.block_size
    if interval % size:
        raise ConfigError(
            f"state_snapshot_interval {interval} must be a multiple of block_size ({size}), or 0;"
            f" set it to {max(interval // size, 1) * size}",
            param="state_snapshot_interval",
        )
    if config.speculation.speculative_config is not None:
        raise ConfigError(
            f"{name} has states, whose steps drafts cannot take back yet; leave speculative_config out",
            param="speculative_config",
        )
    if config.worker.batch_invariant and not (model.gated_delta is None and model.ssd is None):
        raise ConfigError(
            f"{name} has sums that depend on how prompts are cut; leave batch_invariant out", param="batch_invariant"
        )
    if config.lora.enabled:
        raise ConfigError(f"{name} has states, and adapters for their layers are not there yet", param="enable_lora")
