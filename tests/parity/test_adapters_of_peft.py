"""Adapters that PEFT has saved give the tokens of PEFT, unmerged, in a batch that mixes them with rows of the base."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers
from safetensors.torch import load_file

import troupellm
from troupellm.models.adapters.adapter import read_adapter
from troupellm.models.adapters.files import adapter_digest
from troupellm.models.adapters.slots import AdapterSlots
from troupellm.models.load.base_weights import StoredBase
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.messages.worker import AdapterSlot
from troupellm.tests.support.adapters.peft_reference import NEW_TOKENS
from troupellm.tests.support.checkpoints.byte_tokenizer import write_tokenizer
from troupellm.tests.support.checkpoints.close_calls import TOLERANCE
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES, SIZES
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt
from troupellm.tests.support.environment.absence import absent

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(os.environ.get("TROUPE_PEFT", ROOT / ".venv/peft"))
ALL = "all-linear"
CASES: dict[str, dict[str, object] | None] = {
    "base": None,
    "two": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 16, "lora_alpha": 16, "target_modules": ALL, "use_rslora": True},
    "patterns": {
        "r": 4, "lora_alpha": 6, "target_modules": ["o_proj", "up_proj", "down_proj"],
        "rank_pattern": {"o_proj": 2, "layers.1.mlp.up_proj": 8}, "alpha_pattern": {r"layers\.\d+\.mlp\.down_proj": 3},
    },
    "biases": {"r": 3, "lora_alpha": 3, "target_modules": ["k_proj", "gate_proj", "down_proj"], "lora_bias": True},
    "one_layer": {"r": 8, "lora_alpha": 4, "target_modules": ["q_proj", "gate_proj"], "layers_to_transform": [1]},
    "head": {"r": 5, "lora_alpha": 5, "target_modules": ["lm_head", "v_proj"]},
}  # fmt: skip
WIDE: dict[str, dict[str, object] | None] = {
    "base": None,
    "dora": {"r": 4, "lora_alpha": 8, "target_modules": ALL, "use_dora": True},
    "dora_of_two": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "embedding": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "v_proj"]},
    "saved_head": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved_both": {
        "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens"],
    },
}  # fmt: skip
EXPERTS: dict[str, dict[str, object] | None] = {
    "base": None,
    "experts": {
        "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "narrow": {"r": 4, "lora_alpha": 4, "target_modules": ["v_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"]},
}  # fmt: skip
IN_THE_TEXT_PART = r".*language_model.*\.(q_proj|o_proj|gate_proj|down_proj)"
FUSED = {
    "base": None,
    "all": {"r": 8, "lora_alpha": 16, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
}
CONFIGS = {
    "llama": (FAMILIES["llama"], CASES),
    "qwen3_tied": (FAMILIES["qwen3_tied"], {name: case for name, case in CASES.items() if name != "head"}),
    "gemma3": (FAMILIES["gemma3"], {name: CASES[name] for name in ("base", "all", "patterns")}),
    "granite": (FAMILIES["granite"], {name: CASES[name] for name in ("base", "all", "biases", "head")}),
    "phi3": (FAMILIES["phi3"], FUSED),
    "llama_wide": (FAMILIES["llama"], WIDE),
    "qwen2_biases": (FAMILIES["qwen2"], {name: WIDE[name] for name in ("base", "dora", "embedding")}),
    "qwen3_tied_wide": (FAMILIES["qwen3_tied"], {name: WIDE[name] for name in ("base", "embedding", "saved_both")}),
    "gemma3_wide": (FAMILIES["gemma3"], {name: WIDE[name] for name in ("base", "dora_of_two", "embedding")}),
    "mixtral": (FAMILIES["mixtral"], EXPERTS),
    "qwen3_moe": (FAMILIES["qwen3_moe"], EXPERTS),
    "gpt_oss": (FAMILIES["gpt_oss"], EXPERTS),
    "gemma3_with_images": (
        FAMILIES["gemma3_with_images"],
        {"base": None, "text": {"r": 4, "lora_alpha": 8, "target_modules": IN_THE_TEXT_PART}},
    ),
    "llama_small_heads": (
        lambda: transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 3}, head_dim=24),
        {name: CASES[name] for name in ("base", "two", "one_layer")},
    ),
}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "chunks": {"max_num_batched_tokens": 16, "block_size": 4},
    "few blocks": {"num_gpu_blocks_override": 48, "block_size": 4, "max_model_len": 64},
}
"""In the last one requests wait for blocks."""
PROMPTS = [make_prompt(length, seed=length) for length in (5, 23)]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Saved:
    """A base model and PEFT's adapters of it."""

    def __init__(self, folder: Path, name: str) -> None:
        if not PACKAGE.is_dir():
            absent("peft", "`make peft` installs it")
        config, self.cases = CONFIGS[name]
        self.folder, self.pair = folder, Pair(folder / "base", config())
        script = ROOT / "tests/support/adapters/peft_reference.py"
        cases = json.dumps({**self.cases, "prompts": PROMPTS})
        environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-W", "ignore", str(script), str(folder / "base"), str(folder), cases]
        subprocess.run(command, check=True, env=environment)
        self.names = [name for name in self.cases if self.cases[name] is not None]

    def driver(self) -> Driver:
        """With all adapters in slots, in order."""
        model = self.pair.config
        base = StoredBase(self.folder / "base", model, None, ModelConfig(), torch.float32)
        adapters = [read_adapter(self.folder / name, model, 16, base=base) for name in self.names]
        assert [adapter.digest for adapter in adapters] == [adapter_digest(self.folder / name) for name in self.names]
        found = {adapter.digest: adapter for adapter in adapters}
        slots = AdapterSlots(
            model, found.get, num_slots=8, max_rank=16, dtype=torch.float32, device=torch.device("cpu")
        )
        driver = Driver(self.pair.runner(adapters=slots))
        driver.slots = tuple(AdapterSlot(slot, digest) for slot, digest in enumerate(found, 1))
        return driver

    def check(self, name: str, number: int, got: list[int]) -> None:
        """Compare with PEFT's tokens; a token may differ where its two best logits hardly do."""
        stored = load_file(self.folder / f"{name}.safetensors")
        expected, logits = stored[f"tokens.{number}"].tolist(), stored[f"logits.{number}"]
        for index, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
            if ours != theirs:
                best = logits[index].topk(2).values
                assert best[0] - best[1] < TOLERANCE, f"{name}: token {index} is {ours}, not {theirs}"
                return


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """One loop is enough here."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module", params=list(CONFIGS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp(request.param), request.param)


def test_adapters_change_the_tokens(saved: Saved) -> None:
    """Otherwise the others prove nothing."""
    found = [load_file(saved.folder / f"{name}.safetensors")["tokens.1"].tolist() for name in saved.cases]
    assert len({tuple(tokens) for tokens in found}) == len(found)


def test_a_batch_of_all_adapters_and_the_base_gives_the_tokens_of_peft(saved: Saved) -> None:
    driver, rows = saved.driver(), {}
    for number in range(len(PROMPTS)):
        for name in saved.cases:
            rows[len(rows)] = (name, number)
            slot = 0 if name == "base" else 1 + saved.names.index(name)
            driver.submit(len(rows) - 1, PROMPTS[number], slot)
    while any(driver.generated(row) < NEW_TOKENS for row in rows):
        present = [row for row in rows if driver.generated(row) < NEW_TOKENS]
        driver.run({row: min(7, len(driver.tokens[row]) - driver.done[row]) for row in present})
    for row, (name, number) in rows.items():
        saved.check(name, number, driver.answer(row))


def test_each_adapter_alone_gives_the_tokens_of_peft(saved: Saved) -> None:
    driver = saved.driver()
    for row, name in enumerate(saved.cases):
        driver.submit(row, PROMPTS[1], 0 if name == "base" else 1 + saved.names.index(name))
        driver.generate(row, NEW_TOKENS)
        saved.check(name, 1, driver.answer(row))


@pytest.mark.anyio
@pytest.mark.parametrize("settings", list(ENGINES.values()), ids=list(ENGINES))
async def test_the_engine_gives_the_tokens_of_peft_with_fewer_slots_than_adapters(
    saved: Saved, settings: dict[str, Any]
) -> None:
    """All adapters and the base model at once, each prompt three times, so that prefixes are found in the cache."""
    write_tokenizer(saved.folder / "base", saved.pair.config.vocab_size)
    modules = [f"{name}={saved.folder / name}" for name in saved.names]
    asked = [(name, number) for number in range(len(PROMPTS)) for name in saved.cases] * 3
    answers: list[tuple[int, ...]] = [()] * len(asked)
    options = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True}
    async with troupellm.Engine(
        saved.folder / "base", enable_lora=True, lora_modules=modules, max_loras=2, num_threads=1, **settings
    ) as engine:

        async def one(index: int) -> None:
            name, number = asked[index]
            adapter = "" if name == "base" else name
            answers[index] = (await engine.generate(PROMPTS[number], adapter=adapter, **options)).token_ids

        async with anyio.create_task_group() as group:
            for index in range(len(asked)):
                group.start_soon(one, index)
    for (name, number), answer in zip(asked, answers, strict=True):
        saved.check(name, number, list(answer))
