"""The text part of a checkpoint that also sees images or hears sound gives the logits of the whole model, as
`transformers` writes such checkpoints and as they are published.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.config.text_part import DEFAULTS
from troupellm.models.families.registry import describe_decoder
from troupellm.models.load.architecture import read_config, served_part
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ModelLoadError
from troupellm.protocol.messages.worker import LoadProgress
from troupellm.tests.support.checkpoints.close_calls import TOLERANCE
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt
from troupellm.tests.support.checkpoints.text_parts import (
    AROUND_TEXT,
    CLIP,
    SECTION,
    TEXT,
    TEXT_PARTS,
    TextPart,
)
from troupellm.tests.support.checkpoints.watched_logits import watched_logits
from troupellm.tests.support.engines.inside import runner_of

FILE = "model.safetensors"
PROMPT = make_prompt(45)
LIKE_OTHERS = (
    "llava",
    "llava_next",
    "qwen2_vl",
    "qwen3_vl",
    "glm4v",
    "qwen3_omni_moe",
    "smolvlm",
    "idefics3",
    "voxtral",
    "deepseek_vl",
    "lighton_ocr",
)
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in LIKE_OTHERS else ()) for name in TEXT_PARTS]


@pytest.mark.parametrize("name", NAMES)
def test_the_text_part_is_the_whole_model_in_text(name: str, tmp_path: Path) -> None:
    part = TEXT_PARTS[name]
    pair = Pair(tmp_path / "written", part.config(), part.kind)
    assert pair.config.architecture == part.decoder
    assert pair.config.text_part == (name not in AROUND_TEXT)
    driver = Driver(pair.runner())
    driver.submit(0, PROMPT)
    with watched_logits(driver.runner) as seen:
        driver.run({0: 7})
        driver.run({0: 25})
        driver.generate(0, 5)
    expected = pair.logits(driver.tokens[0])[len(PROMPT) - 1 : -1]
    torch.testing.assert_close(torch.cat(seen), expected, atol=TOLERANCE, rtol=TOLERANCE)
    if part.renamed or part.architecture or part.moved is not None:
        other = published(pair, part, tmp_path / "published")
        assert other.config == msgspec.structs.replace(pair.config, text_part=True)
        assert torch.equal(other.own_logits(PROMPT), pair.own_logits(PROMPT))


def published(pair: Pair, part: TextPart, folder: Path) -> Pair:
    """The same checkpoint by another writer."""
    folder.mkdir()
    tensors = {}
    for name, tensor in load_file(pair.folder / FILE).items():
        beginning = next((known for known in part.renamed if name.startswith(known)), "")
        tensors[part.renamed.get(beginning, "") + name.removeprefix(beginning)] = tensor
    if part.architecture == "Phi4MMForCausalLM":
        tensors = within_adapters(tensors)
    save_file(tensors, folder / FILE)
    config = json.loads((pair.folder / "config.json").read_text())
    config["architectures"] = [part.architecture or part.kind]
    if part.moved is not None:
        section = config.pop(SECTION, None) or dict(config)
        if not part.moved:
            config = section | config
        for key in reversed(part.moved):
            section = {key: section}
        config |= section if part.moved else {}
    (folder / "config.json").write_text(json.dumps(config))
    other = Pair.__new__(Pair)
    other.folder, other.reference = folder, pair.reference
    other.open()
    return other


def within_adapters(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As Phi-4-multimodal is published: layers within adapters for images and for speech, and parts that see."""
    found = {"model.embed_tokens_extend.image_embed.weight": torch.zeros(2, 2)}
    for name, tensor in tensors.items():
        layer, last = name.rsplit(".", 1)
        if layer.endswith("_proj"):
            found[f"{layer}.base_layer.{last}"] = tensor
            for kind in ("vision", "speech"):
                found[f"{layer}.lora_A.{kind}.weight"] = torch.ones(2, tensor.shape[1])
                found[f"{layer}.lora_B.{kind}.weight"] = torch.ones(tensor.shape[0], 2)
        else:
            found[name] = tensor
    return found


def test_adapters_without_a_layer_within_them_are_refused(tmp_path: Path) -> None:
    part = TEXT_PARTS["phi4_multimodal"]
    other = published(Pair(tmp_path / "written", part.config(), part.kind), part, tmp_path / "published")
    tensors = load_file(other.folder / FILE)
    tensors = {name.replace(".base_layer", ""): tensor for name, tensor in tensors.items()}
    save_file(tensors, other.folder / FILE)
    with pytest.raises(ModelLoadError, match=r"unknown tensor model\.layers\.\d\.\S+\.lora_A"):
        other.open()


@pytest.mark.parametrize("kind", DEFAULTS)
def test_values_that_a_section_leaves_out_are_those_of_transformers(kind: str) -> None:
    config = CONFIG_MAPPING[kind]()
    theirs = {key: getattr(config, key, None) for key in DEFAULTS[kind]}
    if "rope_theta" in theirs:
        theirs["rope_theta"] = config.rope_parameters["rope_theta"]
    assert DEFAULTS[kind] == theirs


@pytest.mark.slow
@torch.inference_mode()
def test_a_decoder_without_a_family_here_runs_by_the_code_of_transformers(tmp_path: Path) -> None:
    config = transformers.LlavaConfig(text_config={**TEXT, "model_type": "stablelm"}, vision_config=CLIP)
    torch.manual_seed(5)
    model = transformers.LlavaForConditionalGeneration._from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    worker, seen = ModelWorker(tmp_path), list[LoadProgress]()
    worker.load(EngineConfig.from_flat({"device": "cpu", "kv_cache_memory_bytes": 2**20, "block_size": 8}), seen.append)
    driver = Driver(runner_of(worker))
    driver.submit(0, PROMPT)
    driver.run({0: 20})
    driver.generate(0, 6)
    logits = model(input_ids=torch.tensor([driver.tokens[0]])).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == driver.answer(0)
    assert any("StableLmForCausalLM runs by the code of transformers" in progress.detail for progress in seen)
    worker.close()


LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "torch_dtype": "float16",
    "text_config": {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "model_type": "llama",
                    "rms_norm_eps": 1e-05, "torch_dtype": "bfloat16", "vocab_size": 32064},
    "vision_config": {"hidden_size": 1024},
}  # fmt: skip
"""llava-1.5-7b-hf."""


def described(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps({**LLAVA, **changes}))
    return dict(read_config(tmp_path).reader.values)


def test_keys_at_the_top_of_the_file_count_for_the_text(tmp_path: Path) -> None:
    packed = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    values = described(tmp_path, quantization_config=packed)
    assert values["torch_dtype"] == "float16"
    assert values["quantization_config"] == packed
    assert values["hidden_size"] == 4096
    assert values["architectures"] == ["LlamaForCausalLM"]


def test_a_section_that_quantizes_nothing_does_not_count(tmp_path: Path) -> None:
    off = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}
    values = described(tmp_path, text_config={**LLAVA["text_config"], "quantization_config": off})
    assert "quantization_config" not in values


def test_the_first_files_of_glm_4_1v_have_no_section_for_text() -> None:
    """GLM-4.1V-9B-Thinking, smaller."""
    text: dict[str, Any] = {
        "attention_bias": True, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
        "max_position_embeddings": 65536, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "vocab_size": 300,
        "rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    file = {"architectures": ["Glm4vForConditionalGeneration"], "model_type": "glm4v", "torch_dtype": "bfloat16"}
    nested = {**file, "text_config": {**text, "model_type": "glm4v_text"}}
    flat, parted = (describe_decoder(served_part(ConfigReader(values))[0]) for values in ({**file, **text}, nested))
    assert flat == parted
    assert (flat.architecture, flat.layers[0].rotary_dim, flat.text_part) == ("Glm4ForCausalLM", 8, True)


@pytest.mark.parametrize(
    ("outer", "inner", "tied"), [(True, False, True), (False, True, True), (None, None, None), (False, None, False)]
)
def test_a_model_is_tied_if_a_level_of_the_file_says_so(
    tmp_path: Path, outer: bool | None, inner: bool | None, tied: bool | None
) -> None:
    section = LLAVA["text_config"] | ({} if inner is None else {"tie_word_embeddings": inner})
    more = {} if outer is None else {"tie_word_embeddings": outer}
    assert described(tmp_path, text_config=section, **more).get("tie_word_embeddings") == tied


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config must describe the decoder of LlavaForConditionalGeneration, got null"),
        ({"text_config": {"hidden_size": 8}}, "text_config.model_type must name the decoder's type, got null"),
        ({"text_config": {"model_type": "nothing"}}, 'text_config.model_type is no decoder that is served, got "noth'),
        (
            {"architectures": ["MiniCPMV"], "text_config": None, "version": "1.0"},
            "version must be one of 2.0, 2, 2",
        ),
        ({"architectures": ["PaliGemmaForConditionalGeneration"]}, "architecture PaliGemmaFor.* is not supported"),
    ],
)
def test_text_that_cannot_be_served_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        describe_decoder(served_part(ConfigReader({**LLAVA, **changes}))[0])
