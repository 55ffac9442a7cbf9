"""Every encoder family equals `transformers` on a small random checkpoint in fp32, alone and in a crowd of any lengths,
and so do decoders that embed or classify, however their prompts are cut."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.runner.encoder_runner import EncoderRunner
from troupellm.models.worker.load_encoder import LoadedEncoder
from troupellm.models.worker.worker import ModelWorker
from troupellm.protocol.config.engine import EngineConfig
from troupellm.protocol.messages.worker import StepPlan
from troupellm.protocol.params.pooling import PoolingParams, PoolingState
from troupellm.tests.support.checkpoints import tiny_encoder
from troupellm.tests.support.checkpoints.encoder_rows import new_row, prompts, vectors_of

TOLERANCE = 1e-4
ENCODERS = {
    "bert": tiny_encoder.bert,
    "bert_relu": lambda labels=0: tiny_encoder.bert(labels, hidden_act="relu"),
    "bert_tanh": lambda labels=0: tiny_encoder.bert(labels, hidden_act="gelu_new"),
    "roberta": tiny_encoder.roberta,
    "xlm_roberta": tiny_encoder.xlm_roberta,
    "distilbert": tiny_encoder.distilbert,
}
DECODER_SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
DECODERS = {
    "llama": transformers.LlamaConfig(**DECODER_SIZES),
    "mistral": transformers.MistralConfig(**DECODER_SIZES, sliding_window=20),
    "qwen2": transformers.Qwen2Config(**DECODER_SIZES),
    "qwen3": transformers.Qwen3Config(**DECODER_SIZES, head_dim=32),
    "gemma3": transformers.Gemma3TextConfig(
        **DECODER_SIZES, head_dim=32, query_pre_attn_scalar=64, sliding_window=20, sliding_window_pattern=2
    ),
    "phi3": transformers.Phi3Config(**DECODER_SIZES),
    "olmo2": transformers.Olmo2Config(**DECODER_SIZES),
    "glm4": transformers.Glm4Config(**DECODER_SIZES, head_dim=32),
    "smollm3": transformers.SmolLM3Config(**DECODER_SIZES, no_rope_layer_interval=2),
}
SIMPLE = PoolingParams(use_activation=False)


def run_whole(runner: EncoderRunner, texts: list[list[int]], states: list[PoolingState]) -> list[np.ndarray]:
    """One step of whole prompts."""
    rows = tuple(range(len(texts)))
    plan = StepPlan(
        step=0,
        engine_epoch=0,
        rows=rows,
        epochs=(0,) * len(rows),
        starts=(0,) * len(rows),
        counts=tuple(map(len, texts)),
        new_rows=tuple(new_row(row, texts[row], states[row]) for row in rows),
    )
    return vectors_of(runner.run(plan))


def encoder(folder: Path, **settings: object) -> LoadedEncoder:
    config = EngineConfig.from_flat({"model": str(folder), **settings})
    return LoadedEncoder(folder, ConfigReader.load(folder), config, torch.float32, lambda _: None)


@torch.inference_mode()
def hidden_states(model: transformers.PreTrainedModel, tokens: list[int], **more: object) -> torch.Tensor:
    return model(torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)), **more).last_hidden_state[0]


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("pooling", ["cls_token", "mean_tokens"])
def test_embeddings_are_those_of_transformers(family: str, pooling: str, tmp_path: Path) -> None:
    reference = tiny_encoder.write_encoder(tmp_path, ENCODERS[family], pooling=pooling)
    loaded = encoder(tmp_path)
    texts = prompts(tiny_encoder.VOCABULARY)
    ability = loaded.ready(0.0).pooling
    assert ability is not None
    assert ability.normalize
    assert ability.pooling_type == {"cls_token": "CLS", "mean_tokens": "MEAN"}[pooling]
    plain = ability.resolve(SIMPLE)
    crowd = run_whole(loaded.fresh_runner(), texts, [plain] * len(texts))
    normal = run_whole(loaded.fresh_runner(), texts, [ability.resolve(PoolingParams())] * len(texts))
    for text, got, scaled in zip(texts, crowd, normal, strict=True):
        states = hidden_states(reference, text)
        expected = states[0] if pooling == "cls_token" else states.mean(dim=0)
        np.testing.assert_allclose(got, expected.numpy(), atol=TOLERANCE)
        np.testing.assert_allclose(scaled, functional.normalize(expected, dim=0).numpy(), atol=TOLERANCE)
        (alone,) = run_whole(loaded.fresh_runner(), [text], [plain])
        np.testing.assert_allclose(alone, got, atol=TOLERANCE)


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("labels", [1, 3])
def test_classifiers_are_those_of_transformers(family: str, labels: int, tmp_path: Path) -> None:
    reference = tiny_encoder.write_encoder(tmp_path, lambda: ENCODERS[family](labels))
    loaded = encoder(tmp_path)
    ability = loaded.ready(0.0).pooling
    assert ability is not None
    assert ability.tasks == (("score", "classify") if labels == 1 else ("classify",))
    texts = prompts(tiny_encoder.VOCABULARY)
    raw = run_whole(loaded.fresh_runner(), texts, [ability.resolve(SIMPLE)] * len(texts))
    cooked = run_whole(loaded.fresh_runner(), texts, [ability.resolve(PoolingParams())] * len(texts))
    for text, logits, probs in zip(texts, raw, cooked, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([text])).logits[0]
        np.testing.assert_allclose(logits, expected.numpy(), atol=TOLERANCE)
        turned = expected.sigmoid() if labels == 1 else expected.softmax(dim=0)
        np.testing.assert_allclose(probs, turned.numpy(), atol=TOLERANCE)


def test_a_pair_has_two_kinds_of_tokens(tmp_path: Path) -> None:
    reference = tiny_encoder.write_encoder(tmp_path, lambda: tiny_encoder.bert(1))
    loaded = encoder(tmp_path)
    ability = loaded.ready(0.0).pooling
    assert ability is not None
    texts = prompts(tiny_encoder.VOCABULARY, (9, 30, 30))
    states = [ability.resolve(SIMPLE, segment=segment) for segment in (4, 29, 0)]
    got = run_whole(loaded.fresh_runner(), texts, states)
    for text, state, logits in zip(texts, states, got, strict=True):
        types = torch.tensor([[int(bool(state.segment) and place >= state.segment) for place in range(len(text))]])
        with torch.inference_mode():
            expected = reference(torch.tensor([text]), token_type_ids=types).logits[0]
        np.testing.assert_allclose(logits, expected.numpy(), atol=TOLERANCE)


def test_a_masked_language_model_embeds(tmp_path: Path) -> None:
    config = transformers.BertConfig(**tiny_encoder.SIZES)
    reference = tiny_encoder.write_encoder(tmp_path, lambda: transformers.BertForMaskedLM(config))
    loaded = encoder(tmp_path)
    ability = loaded.ready(0.0).pooling
    assert ability is not None
    (text,) = prompts(tiny_encoder.VOCABULARY, (21,))
    (got,) = run_whole(loaded.fresh_runner(), [text], [ability.resolve(SIMPLE)])
    np.testing.assert_allclose(got, hidden_states(reference.bert, text)[0].numpy(), atol=TOLERANCE)


def test_a_row_that_is_not_a_number_fails_alone(tmp_path: Path) -> None:
    tiny_encoder.write_encoder(tmp_path, tiny_encoder.bert, pooling="mean_tokens")
    loaded = encoder(tmp_path)
    ability = loaded.ready(0.0).pooling
    assert ability is not None
    loaded.parts.decoder.words[17] = float("nan")
    texts = [[2, 5, 6, 3], [2, 17, 3], [2, 7, 8, 9, 3]]
    rows = (0, 1, 2)
    plan = StepPlan(
        step=0,
        engine_epoch=0,
        rows=rows,
        epochs=(0, 0, 0),
        starts=(0, 0, 0),
        counts=(4, 3, 5),
        new_rows=tuple(new_row(row, texts[row], ability.resolve(PoolingParams())) for row in rows),
    )
    result = loaded.fresh_runner().run(plan)
    assert [error.row for error in result.errors] == [1]
    assert [entry.row for entry in result.pooled] == [0, 2]


class DecoderDriver:
    """One row through a worker in pieces."""

    def __init__(self, folder: Path, **settings: object) -> None:
        flat = {"model": str(folder), "num_gpu_blocks_override": 40, "max_num_prefill_tokens": 64, "device": "cpu"}
        flat["disable_hybrid_kv_cache_manager"] = True  # one block table a row
        self.worker = ModelWorker(folder)
        self.ready = self.worker.load(EngineConfig.from_flat(flat | settings), lambda _: None)
        self.row = 0

    def vector(self, text: list[int], state: PoolingState, piece: int) -> np.ndarray:
        self.row += 1
        blocks = tuple(range(-(-len(text) // 16)))
        for start in range(0, len(text), piece):
            count = min(piece, len(text) - start)
            plan = StepPlan(
                step=self.row,
                engine_epoch=0,
                rows=(self.row,),
                epochs=(0,),
                starts=(start,),
                counts=(count,),
                new_rows=(new_row(self.row, text, state, blocks),) if start == 0 else (),
            )
            result = self.worker.collect(self.worker.launch(plan))
            assert result.tokens == ()
            assert bool(result.pooled) == (start + count == len(text))
        (vector,) = vectors_of(result)
        return vector


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("kind", ["causal", "bare"])
def test_decoders_embed_as_transformers_would(family: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    make = transformers.AutoModelForCausalLM if kind == "causal" else transformers.AutoModel
    model = make.from_config(DECODERS[family], dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    driver = DecoderDriver(tmp_path)
    assert driver.ready.generates == (kind == "causal")
    ability = driver.ready.pooling
    assert ability is not None
    base = model.model if kind == "causal" else model
    for text in prompts(300, (1, 33, 130), least=1):
        states = hidden_states(base, text)
        for pooling, expected in (("LAST", states[-1]), ("MEAN", states.mean(dim=0)), ("CLS", states[0])):
            state = PoolingState(task="embed", pooling_type=pooling, activation=False)
            for piece in (len(text), 50, 7):
                np.testing.assert_allclose(driver.vector(text, state, piece), expected.numpy(), atol=TOLERANCE)
    driver.worker.close()


@pytest.mark.parametrize("family", DECODERS)
def test_decoders_classify_as_transformers_would(family: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = DECODERS[family].to_dict() | {"num_labels": 3}
    config = type(DECODERS[family])(**config)
    model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    driver = DecoderDriver(tmp_path)
    ability = driver.ready.pooling
    assert ability is not None
    assert ability.tasks == ("classify",)
    assert not driver.ready.generates
    for text in prompts(300, (1, 33, 130), least=1):
        with torch.inference_mode():
            expected = model(torch.tensor([text])).logits[0]
        got = driver.vector(text, ability.resolve(SIMPLE), 50)
        np.testing.assert_allclose(got, expected.numpy(), atol=TOLERANCE)
    driver.worker.close()
