"""A tiny Llama in any quantized format, and what its tokens must be.

A format is a function from a weight to the tensors that are stored for it and to the weight that they stand for.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from troupellm.kernels.quantized_linear import QuantizedWeight, Weight
from troupellm.models.quantization.checkpoint import QuantizedCheckpoint
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import LoadProgress, NewRow, SamplingState, StepPlan

Stored = tuple[dict[str, Tensor], Tensor]
Store = Callable[[str, Tensor], Stored]
PROMPT = (5, 17, 120, 3, 44, 9, 201, 8, 77, 30, 41, 2)
NEW_TOKENS = 10
SETTINGS = {"num_gpu_blocks_override": 16, "block_size": 4, "max_num_prefill_tokens": 64}


def tiny_llama(seed: int = 5, **changes: object) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 288,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.3,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        | changes
    )
    return transformers.LlamaForCausalLM(config).eval()


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}


def write_model(
    folder: Path,
    model: transformers.LlamaForCausalLM,
    store: Store,
    quantization: dict[str, object],
    *,
    plain: Iterable[str] = ("lm_head",),
    shards: int = 1,
) -> Path:
    """Write the model with its linear layers stored by `store`, and give it the weights that they stand for."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = linears(model)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("rotary_emb.inv_freq")}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, layer in layers.items():
        if name in plain:
            continue
        stored, meant = store(name, layer.weight.detach().clone())
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in stored.items()}
        with torch.no_grad():
            layer.weight.copy_(meant)
    config = json.loads(model.config.to_json_string(use_diff=False))
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization})
    )
    save_sharded(folder, {name: tensor.clone() for name, tensor in tensors.items()}, shards)
    return folder


def save_sharded(folder: Path, tensors: dict[str, Tensor], shards: int = 1) -> None:
    """One file, or an index and several: neighbours go to different ones."""
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    homes = {name: names[index % shards] for index, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({name: tensors[name] for name, home in homes.items() if home == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))


def load(path: Path, **settings: object) -> tuple[ModelWorker, list[LoadProgress]]:
    worker, seen = ModelWorker(path), []
    worker.load(EngineConfig.from_flat({**SETTINGS, **settings}), seen.append)
    return worker, seen


def tokens_of(worker: ModelWorker, count: int = NEW_TOKENS) -> list[int]:
    """Greedy tokens, the prompt in two pieces and then one by one."""
    ids = np.array(PROMPT, dtype="<i4").tobytes()
    new = NewRow(
        row=0,
        epoch=0,
        request_id="0",
        token_ids=ids,
        num_prompt_tokens=len(PROMPT),
        sampling=SamplingState(temperature=0.0),
        blocks=(tuple(range(16)),),
    )
    spans, found = [(0, 7), (7, len(PROMPT) - 7)], []
    while len(found) < count:
        start, size = spans.pop(0) if spans else (len(PROMPT) + len(found) - 1, 1)
        plan = StepPlan(
            step=start,
            engine_epoch=0,
            rows=(0,),
            epochs=(0,),
            starts=(start,),
            counts=(size,),
            new_rows=(new,) if start == 0 else (),
        )
        found += worker.collect(worker.launch(plan)).tokens
    return found


@torch.inference_mode()
def check_tokens(model: transformers.LlamaForCausalLM, found: list[int], tolerance: float = 1e-4) -> None:
    """Every token is the reference's best one, or as good within `tolerance` of its logit."""
    logits = model(torch.tensor([[*PROMPT, *found]])).logits[0, len(PROMPT) - 1 : -1]
    behind = logits.max(dim=-1).values - logits.gather(1, torch.tensor(found)[:, None])[:, 0]
    assert behind.max() <= tolerance, f"tokens {found} are behind the best by {behind.tolist()}"


def take_outlined(stored: QuantizedCheckpoint, name: str, shape: tuple[int, int]) -> Weight:
    """A layer's weight, which is what the headers said of it."""
    outline = stored.form.outline(stored, name)
    weight = stored.linear(name, shape)
    found = weight.outlines[0] if isinstance(weight, QuantizedWeight) else None
    if outline is None or found is None:
        assert outline == found
        return weight
    assert outline == replace(found, offsets=outline.offsets, ordered=outline.ordered)
    assert outline.offsets >= found.offsets, "what only numbers show is counted"
    assert outline.ordered >= found.ordered
    return weight


def quantize_inputs(model: torch.nn.Module, plain: Iterable[str] = ("lm_head",)) -> None:
    """From now on inputs of linear layers are rounded to eight bits per token, as kernels for w8a8 do it."""

    def rounded(module: torch.nn.Linear, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        scale = inputs[0].abs().amax(dim=-1, keepdim=True) / 127
        return (torch.round(inputs[0] / scale) * scale,)

    for name, layer in linears(model).items():
        if name not in plain:
            layer.register_forward_pre_hook(rounded)


def signal_to_error(weight: Tensor, meant: Tensor) -> float:
    """Of a quantization, in decibels."""
    return float(10 * torch.log10(weight.square().sum() / (weight - meant).square().sum()))
