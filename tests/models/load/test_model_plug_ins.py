"""Families and formats of other packages: installed by entry points, read like our own, and refused by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.families.registry import GROUP, describe_decoder, has_family
from troupellm.models.quantization.formats import read_format
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.checkpoints.tiny_model import write_tiny_model

TESTS = Path(__file__).resolve().parents[2]
PLUG_IN = TESTS / "support" / "plug_ins" / "toy_plug_in"
CONFIG = {
    "architectures": ["ToyForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "vocab_size": 300, "max_position_embeddings": 512, "logit_factor": 0.5,
}  # fmt: skip
ANSWER = """
import asyncio, json, sys
import troupellm

async def main():
    settings = {"kv_cache_memory_bytes": 4 * 2**20, "device": "cpu", "num_threads": 1}
    async with troupellm.Engine(sys.argv[1], **settings) as engine:
        told = await engine.generate([5, 6, 7], max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
        print(json.dumps([told.token_ids, [entry.logprob for entry in told.choices[0].logprobs]]))

asyncio.run(main())
"""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PLUG_IN)


def test_an_installed_family_describes_its_architecture(installed: None) -> None:
    reader = ConfigReader(CONFIG)
    assert has_family(reader)
    assert describe_decoder(reader).logit_scale == 0.5
    assert read_format(ConfigReader({"quantization_config": {"quant_method": "row-bytes", "version": "1"}})) is not None


def test_a_plug_in_refuses_a_setting_by_its_key(installed: None) -> None:
    with pytest.raises(ModelLoadError, match="config.json: logit_factor must be a number above 0"):
        describe_decoder(ConfigReader({**CONFIG, "logit_factor": -1}))
    with pytest.raises(ModelLoadError, match=r"quantization_config.version must be one of 1, got \"2\""):
        read_format(ConfigReader({"quantization_config": {"quant_method": "row-bytes", "version": "2"}}))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("nowhere_to_be_found:describe", "failed: No module named 'nowhere_to_be_found'"),
        ("json:loads", "failed: the JSON object must be str"),
        ("builtins:str", "must return a DecoderConfig, got str"),
    ],
)
def test_a_broken_plug_in_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, reason: str) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nBrokenForCausalLM = {value}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelLoadError, match=f"the plug-in BrokenForCausalLM of {GROUP} {reason}"):
        describe_decoder(ConfigReader({**CONFIG, "architectures": ["BrokenForCausalLM"]}))


def test_a_family_of_our_own_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "greedy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greedy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nLlamaForCausalLM = nowhere_to_be_found:describe\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert describe_decoder(ConfigReader({**CONFIG, "architectures": ["LlamaForCausalLM"]})).num_layers == 2


@pytest.mark.slow
def test_a_fresh_process_serves_a_model_of_an_installed_package(tmp_path: Path) -> None:
    """The codes are exact here, so that the answers differ by the factor on the logits alone."""
    plain, toy = write_tiny_model(tmp_path / "plain"), write_tiny_model(tmp_path / "toy")
    tensors, packed = load_file(plain / "model.safetensors"), {}
    for name, tensor in tensors.items():
        layer, _, last = name.rpartition(".")
        if ".layers." not in name or last != "weight" or tensor.ndim != 2:
            packed[name] = tensor
            continue
        scales = (np.abs(tensor).max(1) / 127.0).astype(np.float32)
        codes = np.rint(tensor / scales[:, None]).astype(np.int8)
        packed |= {f"{layer}.codes": codes, f"{layer}.scales": scales}
        tensors[name] = codes.astype(np.float32) * scales[:, None]
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, toy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config |= {"architectures": ["ToyForCausalLM"], "model_type": "toy", "logit_factor": 2.0}
    config["quantization_config"] = {"quant_method": "row-bytes", "version": "1"}
    (toy / "config.json").write_text(json.dumps(config))
    (tokens, scores), (same, sharper) = _answer(plain), _answer(toy)
    assert tokens == same
    assert all(twice > once for once, twice in zip(scores, sharper, strict=True))


def _answer(folder: Path) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities, from a process that has the package on its path."""
    command = [sys.executable, "-c", ANSWER, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(PLUG_IN)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    tokens, scores = json.loads(done.stdout.splitlines()[-1])
    return tokens, scores


def test_the_documents_show_the_package_that_is_tested() -> None:
    page = (TESTS.parent / "docs" / "model-plug-ins.md").read_text(encoding="utf-8")
    for file in (PLUG_IN / "toy_plug_in.py", PLUG_IN / "toy_plug_in-1.0.dist-info" / "entry_points.txt"):
        assert file.read_text(encoding="utf-8").strip() in page
