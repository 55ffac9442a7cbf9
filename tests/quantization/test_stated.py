"""A `quantization` setting that names how a checkpoint is stored."""

from pathlib import Path
from typing import Any

import pytest

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.quantization.stated import settle_quantization
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.config.setting_types import STORED_AS, on_load_mode
from troupellm.protocol.errors import ConfigError


def settled(stored: str | None, wanted: str | None) -> Any:
    section = {} if stored is None else {"quantization_config": {"quant_method": stored}}
    reader = ConfigReader({"architectures": ["LlamaForCausalLM"], **section})
    config = EngineConfig.from_flat({"quantization": wanted, "max_num_seqs": 3})
    same, found = settle_quantization(Path("nowhere"), reader, config)
    assert same is reader
    assert found.scheduler.max_num_seqs == 3
    return found.model.quantization


@pytest.mark.parametrize("method", [*sorted(set(STORED_AS) - {"gguf"}), "fp8"])
def test_the_method_of_the_checkpoint_changes_nothing(method: str) -> None:
    assert settled(method, method) is None


def test_a_method_of_a_plain_checkpoint_is_kept() -> None:
    assert [settled(None, mode) for mode in ("fp8", "int8", None, "None")] == ["fp8", "int8", None, None]
    assert settled("gptq", "int8") == "int8"


@pytest.mark.parametrize(
    ("stored", "wanted", "message"),
    [
        ("gptq", "awq", "quantization is awq, but the checkpoint is stored as gptq; leave the setting out"),
        (None, "mxfp4", "quantization is mxfp4, but the checkpoint is not quantized; leave the setting out"),
        ("awq", "gguf", "quantization is gguf, but the checkpoint is stored as awq; leave the setting out"),
    ],
)
def test_another_method_is_refused_with_both_names(stored: str | None, wanted: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settled(stored, wanted)
    assert (caught.value.message, caught.value.param) == (message, "quantization")


def test_a_gguf_file_is_stored_as_gguf(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    config = EngineConfig.from_flat({"quantization": "gguf"})
    assert settle_quantization(file, ConfigReader({}), config)[1] == EngineConfig()


def test_only_methods_of_loading_quantize() -> None:
    assert [on_load_mode(name) for name in STORED_AS] == [None] * len(STORED_AS)
    assert on_load_mode("int4") == "int4"
