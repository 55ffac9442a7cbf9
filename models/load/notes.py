"""Notes of the load log beside sizes and progress."""

from dataclasses import replace

from troupellm.kernels.cpp.build import compiler_is_missing, to_be_built
from troupellm.kernels.paged_attention.backends import Planner, choose
from troupellm.models.checkpoint.next_token_tensors import next_token_tensors
from troupellm.models.checkpoint.safetensors import Checkpoint
from troupellm.models.checkpoint.weight_names import StoredWeights
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.hub.errors import plain_name
from troupellm.protocol.messages.worker import LoadProgress, ProgressSink


def report_compiling(progress: ProgressSink, *, on_cpu: bool) -> None:
    """Say why the first start on a machine takes longer, or why every step does."""
    if on_cpu and to_be_built():
        progress(LoadProgress(phase="resolve", detail="compiling the CPU's kernels, once on this machine"))
    elif on_cpu and compiler_is_missing():
        detail = "there is no C++ compiler (g++): torch computes every step, which is several times slower on a CPU"
        progress(LoadProgress(phase="resolve", detail=detail))


def attention_note(attention: Planner) -> str:
    """Name the attention back end; warn if `--batch-invariant` makes it much slower because fast kernels lack it."""
    name, needs = attention.backend.name, attention.needs
    without = choose(replace(needs, batch_invariant=False)).name
    if choose(needs).name == without:
        return f"attention: {name}"
    return f"attention: {name}, token by token and without graphs for batch_invariant: much slower than {without}"


def next_token_notes(stored: StoredWeights, model: DecoderConfig) -> list[str]:
    """Say that the checkpoint's layers for multi-token prediction are left out."""
    names = next_token_tensors(stored.names(), model.num_layers) if isinstance(stored, Checkpoint) else stored.left_out
    if not names:
        return []
    return [f"{len(names)} tensors for multi-token prediction are left out, such as {plain_name(names[0])}"]


def rope_notes(model: DecoderConfig, max_model_len: int) -> list[str]:
    """Say that the context length fixes the rotation, where shorter prompts alone would have another one."""
    return [
        f"longrope: long factors for all lengths; --max-model-len {rope.original_max_position} takes the short ones"
        for rope in model.ropes
        if rope.kind == "longrope"
        and rope.long_factor != rope.short_factor
        and max_model_len > rope.original_max_position
    ]
