"""The ways that checkpoints hold experts: apart, in one tensor, in MXFP4, and quantized while they are read."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from troupellm.kernels.linear import linear
from troupellm.models.checkpoint.safetensors import Checkpoint, RandomWeights
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.layers.decoder import Decoder
from troupellm.models.layers.experts import Experts
from troupellm.models.load.architecture import describe_model
from troupellm.models.quantization.checkpoint import QuantizedCheckpoint
from troupellm.models.quantization.formats import read_format
from troupellm.models.quantization.on_load import QuantizeOnLoad
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.checkpoints.close_calls import TOLERANCE
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import MAX_LEN, Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt

FILE = "model.safetensors"
PROMPT = make_prompt(40)


def logits(pair: Pair, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Of the prompt's last token."""
    seen, plain = [], decoder.logits
    monkeypatch.setattr(decoder, "logits", lambda hidden: seen.append(plain(hidden)) or seen[0].clone())
    pair.decoder = decoder
    driver = Driver(pair.runner())
    driver.submit(0, PROMPT)
    driver.run({0: len(PROMPT)})
    return seen[0][0]


def read(folder: Path) -> Decoder:
    checkpoint = Checkpoint(folder, torch.float32)
    decoder = Decoder(describe_model(folder), checkpoint, max_model_len=MAX_LEN)
    checkpoint.finish()
    return decoder


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_experts_in_one_tensor_are_those_apart(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path / "apart", FAMILIES[family]())
    pair.reference.save_pretrained(tmp_path / "stacked", save_original_format=False)
    apart, stacked = (set(load_file(tmp_path / name / FILE)) for name in ("apart", "stacked"))
    assert "model.layers.0.mlp.experts.gate_up_proj" in stacked - apart
    expected = logits(pair, read(tmp_path / "apart"), monkeypatch)
    assert torch.equal(logits(pair, read(tmp_path / "stacked"), monkeypatch), expected)


def test_square_experts_lie_as_their_family_stores_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of gpt-oss-20b in BF16 are square: their shape does not show which side the inputs are on."""
    config = FAMILIES["gpt_oss"]()
    config.intermediate_size = config.hidden_size
    pair = Pair(tmp_path, config)
    stored = load_file(tmp_path / FILE)["model.layers.0.mlp.experts.down_proj"]
    assert stored.shape[1] == stored.shape[2]
    got, expected = logits(pair, pair.decoder, monkeypatch), pair.logits(PROMPT)[-1]
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_router_in_float32_keeps_its_bits_in_a_model_of_fewer(tmp_path: Path) -> None:
    """ERNIE 4.5, GLM-4.5 and MiniMax M2 are published so."""
    pair = Pair(tmp_path, FAMILIES["minimax_m2"]())
    routers = {name: tensor for name, tensor in load_file(tmp_path / FILE).items() if name.endswith(".gate.weight")}
    stored = next(tensor for name, tensor in routers.items() if ".layers.0." in name)
    decoder = Decoder(pair.config, Checkpoint(tmp_path, torch.bfloat16), max_model_len=MAX_LEN)
    part, hidden = decoder.layers[0].feed_forward, torch.randn(5, 64).bfloat16()
    assert isinstance(part, Experts)
    with torch.inference_mode():
        torch.testing.assert_close(linear(hidden.float(), part.router), hidden.float() @ stored.t())
        assert part(hidden, 5).dtype == torch.bfloat16


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """gpt-oss with experts of random four-bit codes, in both engines; the reference has them from transformers' own
    arithmetic."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    pair = Pair(folder, FAMILIES["gpt_oss"]())
    tensors, generator = load_file(folder / FILE), torch.Generator().manual_seed(3)
    state = dict(pair.reference.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 127, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name].data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, folder / FILE)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    pair.config, pair.decoder = describe_model(folder), read(folder)
    return pair


def test_four_bit_experts_give_the_same_tokens(four_bits: Pair) -> None:
    driver = Driver(four_bits.runner())
    prompts = {0: make_prompt(9), 1: make_prompt(37)}
    for row, prompt in prompts.items():
        driver.submit(row, prompt)
    driver.run({0: 9, 1: 16})
    driver.run({0: 1, 1: 21})
    while driver.generated(1) < 12:
        driver.run({0: 1, 1: 1})
    for row, prompt in prompts.items():
        four_bits.check(prompt, driver.answer(row))


def test_four_bit_experts_give_the_same_logits(four_bits: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    got, expected = logits(four_bits, four_bits.decoder, monkeypatch), four_bits.logits(PROMPT)[-1]
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_scales_of_another_shape_are_refused(four_bits: Pair, tmp_path: Path) -> None:
    tensors = load_file(four_bits.folder / FILE)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, :, :2].contiguous()
    save_file(tensors, tmp_path / FILE)
    (tmp_path / "config.json").write_bytes((four_bits.folder / "config.json").read_bytes())
    with pytest.raises(ModelLoadError, match=f"{name} has shape"):
        read(tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_are_quantized_while_they_are_read(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path, FAMILIES[family]())
    source = QuantizeOnLoad(Checkpoint(tmp_path, torch.float32), "int8-weight-only")
    decoder = Decoder(pair.config, source, max_model_len=MAX_LEN)
    part = decoder.layers[0].feed_forward
    assert isinstance(part, Experts)
    assert all("int8" in packed.kind for packed in (*part.experts.gate_up, *part.experts.down))
    assert part.router.kind == "", "what decides is not rounded"
    got, expected = logits(pair, decoder, monkeypatch), pair.logits(PROMPT)[-1]
    error = (got - expected).norm() / expected.norm()
    assert 1e-5 < error < 0.1


def test_experts_of_a_quantized_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8 with a scale per block, as Qwen3-MoE is published; the router is plain."""
    pair = Pair(tmp_path, FAMILIES["qwen3_moe"]())
    tensors = load_file(tmp_path / FILE)
    for name in [name for name in tensors if ".experts." in name]:
        weight = tensors[name]
        blocks = weight.unflatten(0, (-1, 16)).unflatten(2, (-1, 16))
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
        tensors[name] = (blocks / scale).to(torch.float8_e4m3fn).view(torch.uint8).view(weight.shape)
        tensors[name] = tensors[name].view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
        part = dict(pair.reference.named_parameters())
        layer, expert, projection = re.findall(r"(.*\.experts)\.(\d+)\.(\w+)", name)[0]
        meant = (tensors[name].float().unflatten(0, (-1, 16)).unflatten(2, (-1, 16)) * scale).view(weight.shape)
        if projection == "down_proj":
            part[f"{layer}.down_proj"].data[int(expert)] = meant
        else:
            begin = 0 if projection == "gate_proj" else meant.shape[0]
            part[f"{layer}.gate_up_proj"].data[int(expert), begin : begin + meant.shape[0]] = meant
    save_file(tensors, tmp_path / FILE)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    form = read_format(ConfigReader.load(tmp_path))
    assert form is not None
    checkpoint = QuantizedCheckpoint(tmp_path, torch.float32, lambda _: None, form)
    checkpoint.ignore("lm_head.weight")
    decoder = Decoder(describe_model(tmp_path), checkpoint, max_model_len=MAX_LEN)
    checkpoint.finish()
    got = logits(pair, decoder, monkeypatch)
    torch.testing.assert_close(got, pair.logits(PROMPT)[-1], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_random_weights_for_benchmarks(family: str, tmp_path: Path) -> None:
    FAMILIES[family]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    architecture = {"mixtral": "MixtralForCausalLM", "gpt_oss": "GptOssForCausalLM"}[family]
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    decoder = Decoder(describe_model(tmp_path), RandomWeights(torch.float32), max_model_len=MAX_LEN)
    assert isinstance(decoder.layers[0].feed_forward, Experts)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    pair = Pair(tmp_path, FAMILIES["mixtral"]())
    tensors = load_file(tmp_path / FILE)
    del tensors["model.layers.1.block_sparse_moe.experts.5.w3.weight"]
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(ModelLoadError, match=r"layers\.1\.block_sparse_moe\.experts\.5\.w3\.weight is missing"):
        read(pair.folder)
