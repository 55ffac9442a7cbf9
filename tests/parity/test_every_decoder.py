"""Every decoder that `transformers` has: served by its code with its tokens, or refused by a typed error.

every_decoder.json says which, for the version that it names. Nothing may fail otherwise, in any version.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.transformers_backend.describe import describe
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError, ModelLoadError
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt
from troupellm.tests.support.checkpoints.small_configs import small
from troupellm.tests.support.engines.inside import runner_of

pytestmark = pytest.mark.slow

TABLE = json.loads(Path(__file__).with_name("every_decoder.json").read_text())
"""`served`: types of models; `refused`: the same by what is said, without the name of the architecture. Both are about
the code of `transformers`; `families` are types that Troupe runs itself (test_decoder_counts.py)."""
SERVED = "served"
EXPECTED = {name: reason for reason, names in ({SERVED: TABLE["served"]} | TABLE["refused"]).items() for name in names}
ONE_PER_HEAD = {"num_key_value_heads": 4}
LATENT = (
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "dots3_note_text",
    "glm4_moe_lite",
    "longcat_flash",
    "minicpm3",
    "youtu",
)
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(LATENT, ONE_PER_HEAD),
    "codegen": {"rotary_dim": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 1, "num_decoder_layers": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 48]},
    "xlnet": {"d_head": 16},
    "zamba": {"num_hidden_layers": None},
    "zamba2": {"num_hidden_layers": None},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings of model types that differ from those of `small_configs`."""
AS_THEY_ARE = {"dots3_note"}
"""Their sizes hang together, and they are refused before there is memory for them."""
PROMPTS = (make_prompt(33), make_prompt(5, 1))
NEW_TOKENS = 8


@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_decoder_is_served_or_refused(kind: str, tmp_path: Path) -> None:
    found = outcome(kind, tmp_path)
    if transformers.__version__ == TABLE["transformers"]:
        assert found == EXPECTED[kind]


def test_the_table_has_nothing_else() -> None:
    if transformers.__version__ == TABLE["transformers"]:
        assert EXPECTED.keys() == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()


def outcome(kind: str, folder: Path) -> str:
    """SERVED, or what is said instead."""
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    architecture = named if isinstance(named, str) else named[0]
    known = CONFIG_MAPPING[kind]
    config = known() if kind in AS_THEY_ARE else small(known, CHANGES.get(kind, {}))
    config.architectures = [architecture]
    config.save_pretrained(folder)
    worker = ModelWorker(folder)
    try:
        describe(folder, ConfigReader.load(folder))  # some could not even be built below
        model = written(folder, config)
        flat = {"device": "cpu", "model_impl": "transformers", "kv_cache_memory_bytes": 2**20, "block_size": 8}
        worker.load(EngineConfig.from_flat(flat | {"disable_hybrid_kv_cache_manager": True}), lambda _: None)
    except (ModelLoadError, ConfigError) as error:
        return reason(error.message.removeprefix(architecture).strip(": "))
    assert runner_of(worker) is not None
    check_tokens(model, Driver(runner_of(worker)))
    worker.close()
    return SERVED


def reason(message: str) -> str:
    """Without the words of other packages' errors, which change from version to version."""
    return re.sub(r"(\w+Error): .*", r"\1", message)


def written(folder: Path, config: transformers.PreTrainedConfig) -> torch.nn.Module:
    """A model of that configuration with random numbers, stored."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):  # else all 1 or all 0, which hides mistakes
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def check_tokens(model: torch.nn.Module, driver: Driver) -> None:
    """Two rows, one in chunks: each token is the best one of `transformers`, or as good to one part in a thousand."""
    for row, prompt in enumerate(PROMPTS):
        driver.submit(row, prompt)
    while driver.generated(0) < NEW_TOKENS:
        driver.run({row: min(20, len(driver.tokens[row]) - driver.done[row]) for row in range(len(PROMPTS))})
    for row, prompt in enumerate(PROMPTS):
        tokens = driver.tokens[row]
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(driver.answer(row))[:, None])
        assert (logits.amax(dim=1, keepdim=True) - chosen).max() <= 1e-3 * logits.std()
