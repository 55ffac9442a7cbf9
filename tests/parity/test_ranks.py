"""Several ranks that share a model give the tokens of `transformers`, however a plan is cut."""

from pathlib import Path
from typing import Any

import pytest
import torch

from troupellm.kernels import meeting
from troupellm.models.parallel.gloo import GlooRanks
from troupellm.models.parallel.limits import check_parallel
from troupellm.models.parallel.shared_memory import SharedMemoryRanks
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.messages.worker import NewRow, SamplingState, StepPlan
from troupellm.tests.support.checkpoints.close_calls import TOLERANCE
from troupellm.tests.support.checkpoints.decoder_families import FAMILIES
from troupellm.tests.support.checkpoints.decoder_pairs import Pair
from troupellm.tests.support.checkpoints.hand_driver import Driver, make_prompt
from troupellm.tests.support.checkpoints.ragged_batch import check_ragged_batch
from troupellm.tests.support.checkpoints.rank_pairs import ranked
from troupellm.tests.support.checkpoints.watched_logits import watched_logits

KINDS = {
    "gloo": (GlooRanks.lead, GlooRanks.follow),
    "shared_memory": (SharedMemoryRanks.lead, SharedMemoryRanks.follow),
}
needs_memory = pytest.mark.skipif(not meeting.available(), reason="shared memory needs compiled code")
REFUSED = {
    "deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "deepseek_v3_halves", "mistral4", "olmo2", "olmo3", "lfm2",
    "lfm2_moe", "lfm2_biases", "qwen3_next", "qwen3_5", "granite4_hybrid", "granite4_experts", "gemma4",
    "gemma4_experts", "gemma4_shared", "minimax_m2",
}  # fmt: skip
"""Families that several ranks do not serve yet."""
SOON = ("llama", "phi3", "mixtral")
"""Beside the other ones, in `make test`: separate weights, merged ones, and experts."""
NAMES = [pytest.param(name, marks=() if name in SOON else pytest.mark.slow) for name in FAMILIES if name not in REFUSED]


def pair_of(name: str, factory: pytest.TempPathFactory) -> Pair:
    return Pair(factory.mktemp(name), FAMILIES[name]())


def check(pair: Pair, size: int, kind: str) -> None:
    """Tokens and logits of several ranks."""
    lead, follow = KINDS[kind]
    with ranked(pair, size, lead, follow) as shared:
        check_ragged_batch(shared)
        prompt = make_prompt(40)
        driver = Driver(shared.runner())
        driver.submit(0, prompt)
        with watched_logits(driver.runner) as seen:
            driver.run({0: 23})
            driver.generate(0, 6)
    expected = pair.logits(driver.tokens[0])[len(prompt) - 1 : -1]
    torch.testing.assert_close(torch.cat(seen), expected, atol=TOLERANCE, rtol=TOLERANCE)


@needs_memory
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_give_the_tokens_of_transformers(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(pair_of(name, tmp_path_factory), 2, "shared_memory")


@needs_memory
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama_one_kv_head", "gpt_oss"])
def test_four_ranks_share_kv_heads(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    check(pair_of(name, tmp_path_factory), 4, "shared_memory")


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the system does not say where its sockets listen")
def test_gloo_listens_on_the_loopback_interface_alone() -> None:
    leader, address = GlooRanks.lead(2, 1.0)
    port = int(address.rpartition(":")[2])
    listening = [
        line.split()[1].partition(":")[0]
        for table in Path("/proc/net").glob("tcp*")
        for line in table.read_text().splitlines()[1:]
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    ]
    leader.close()
    assert listening == ["0100007F"]


def test_ranks_over_gloo_give_the_tokens_of_transformers(tmp_path_factory: pytest.TempPathFactory) -> None:
    check(pair_of("llama", tmp_path_factory), 2, "gloo")


@pytest.mark.parametrize("kind", [pytest.param("shared_memory", marks=needs_memory), "gloo"])
def test_embeddings_stand_for_tokens_on_every_rank(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    prompt, pieces = make_prompt(11), ((0, 5), (5, 6), (11, 1), (12, 1), (13, 1))
    lead, follow = KINDS[kind]
    with ranked(pair_of("llama", tmp_path_factory), 2, lead, follow) as shared:
        driver = Driver(shared.runner())
        driver.submit(0, prompt)
        driver.generate(0, 4)
        row = NewRow(
            row=0,
            epoch=1,
            request_id="",
            token_ids=bytes(4 * len(prompt)),
            num_prompt_tokens=len(prompt),
            sampling=SamplingState(temperature=0.0),
            blocks=((20, 21),),
            embeddings=shared.decoder.embed(torch.tensor(prompt)).numpy().tobytes(),
            state=0,
        )
        runner = shared.runner()
        found: list[int] = []
        for step, (start, count) in enumerate(pieces):
            new = () if step else (row,)
            plan = StepPlan(
                step=step, engine_epoch=0, rows=(0,), epochs=(1,), starts=(start,), counts=(count,), new_rows=new
            )
            found += runner.run(plan).tokens
    assert found == driver.answer(0)


def limits(pair: Pair, size: int = 2, **settings: Any) -> None:
    config = EngineConfig.from_flat({"tensor_parallel_size": size, **settings})
    check_parallel(pair.folder, pair.config, config, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_other_families_are_refused_by_name(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(
        ConfigError, match=r"^tensor_parallel_size 2 does not serve .* yet; use tensor_parallel_size 1$"
    ):
        limits(pair_of(name, tmp_path_factory))


def test_settings_and_sizes_are_refused_by_name(tmp_path_factory: pytest.TempPathFactory) -> None:
    pair = pair_of("llama", tmp_path_factory)
    limits(pair)
    for settings, named in (
        ({"quantization": "int8"}, "quantization on load"),
        ({"kv_cache_dtype": "int8"}, "the cache type int8"),
        ({"batch_invariant": True}, "batch_invariant"),
        ({"enable_lora": True}, "adapters"),
        ({"speculative_config": {"method": "ngram"}}, "speculative decoding"),
        ({"kv_offloading_size": 1.0}, "KV offloading"),
        ({"poison_memory": "nan"}, "poison_memory"),
        ({"runner": "pooling"}, "embeddings and classification alone"),
    ):
        with pytest.raises(ConfigError, match=f"^tensor_parallel_size 2 does not serve {named} yet"):
            limits(pair, **settings)
    with pytest.raises(
        ConfigError, match=r"does not divide .*\(4 heads, 2 KV heads, .* 112\): tensor parallel 1, 2, 4$"
    ):
        limits(pair, size=3)
    file = pair.folder / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match="GGUF files"):
        check_parallel(file, pair.config, EngineConfig.from_flat({"tensor_parallel_size": 2}), None)
