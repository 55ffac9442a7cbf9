"""Metadata of a wrong type is refused by its key, in every document that is made from it."""

import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from transformers import LlamaConfig

from troupellm.models.config.generation_config import load_generation_defaults
from troupellm.models.config.gguf_documents import document
from troupellm.models.hub.gguf_header import read_header
from troupellm.models.tokenizer.gguf_tokenizer import gguf_tokenizer
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.gguf.gguf_llama import SIZES, Kind, Written

FUZZ = settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
    database=None,
)
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
BOOL, TEXT, ARRAY = 7, 8, 9
KEYS = (
    *(
        f"tokenizer.ggml.{name}"
        for name in (
            "model",
            "pre",
            "tokens",
            "token_type",
            "merges",
            "scores",
            "bos_token_id",
            "eos_token_id",
            "eot_token_id",
            "eom_token_id",
            "unknown_token_id",
            "seperator_token_id",
            "padding_token_id",
            "mask_token_id",
            "add_bos_token",
            "add_eos_token",
            "add_space_prefix",
        )
    ),
    "tokenizer.chat_template",
    "tokenizer.chat_templates",
    "tokenizer.chat_template.a",
    *(f"general.sampling.{name}" for name in ("temp", "top_k", "top_p", "min_p", "penalty_repeat")),
    *(
        f"llama.{name}"
        for name in (
            "context_length",
            "embedding_length",
            "block_count",
            "feed_forward_length",
            "attention.head_count",
            "attention.head_count_kv",
            "attention.key_length",
            "attention.layer_norm_rms_epsilon",
            "rope.dimension_count",
            "rope.freq_base",
            "rope.scaling.type",
            "rope.scaling.factor",
            "rope.scale_linear",
            "attention.sliding_window",
        )
    ),
    "general.architecture",
    "general.alignment",
    "split.count",
)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**SIZES | {"hidden_size": 64, "intermediate_size": 64})
    return Written(tmp_path_factory.mktemp("gguf") / "tiny.gguf", config, {"": Kind.Q8_0}).path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def number(kind: int, value: float) -> bytes:
    return struct.pack("<I" + NUMBERS[kind], kind, value)


def numbers(kind: int, values: list[float]) -> bytes:
    return struct.pack(f"<IIQ{len(values)}{NUMBERS[kind]}", ARRAY, kind, len(values), *values)


def said(value: str) -> bytes:
    return struct.pack("<I", TEXT) + text(value)


def texts(values: list[str]) -> bytes:
    return struct.pack("<IIQ", ARRAY, TEXT, len(values)) + b"".join(map(text, values))


def write(path: Path, valid: Path, changes: dict[str, bytes]) -> Path:
    """The valid file with other values, type and all, for some keys."""
    keys, data = list(read_header(valid).metadata), valid.read_bytes()
    begins, at = {}, 24
    for key in keys:
        begins[key] = at = data.index(text(key), at)
    places = [*begins.values(), data.index(text("token_embd.weight"), at)]
    entries = {key: data[begin + 8 + len(key) : end] for key, begin, end in zip(keys, places, places[1:], strict=False)}
    entries |= changes
    body = b"".join(text(key) + value for key, value in entries.items())
    path.write_bytes(data[:16] + struct.pack("<Q", len(entries)) + body + data[places[-1] :] + bytes(64))
    return path


def outcome(path: Path) -> str:
    """Everything that is made from a header; only one kind of error may come out."""
    found = []
    for read in (
        lambda: document(path, "config.json"),
        lambda: document(path, "tokenizer_config.json"),
        lambda: document(path, "generation_config.json"),
        lambda: gguf_tokenizer(path),
        lambda: load_generation_defaults(path, "auto"),
    ):
        try:
            read()
        except ModelLoadError as error:
            found.append(error.message)
    return "\n".join(found)


@st.composite
def values(draw: st.DrawFn, length: int) -> bytes:
    """Of any type; arrays as long as the vocabulary, too."""
    kind, array = draw(st.sampled_from([*NUMBERS, BOOL, TEXT])), draw(st.booleans())
    count = draw(st.sampled_from([0, 1, 3, length])) if array else 1
    if kind == TEXT:
        some = draw(st.lists(st.text(max_size=6), min_size=1, max_size=3))
        return texts([some[index % len(some)] for index in range(count)]) if array else said(some[0])
    if kind == BOOL:
        return struct.pack("<I", BOOL) + b"\1" if not array else struct.pack("<IIQ", ARRAY, BOOL, count) + bytes(count)
    least = 0.0 if kind in (0, 2, 4, 10) else -5.0
    odd = [0, 1, 127, least if kind in (6, 12) else int(least)] + ([float("nan"), float("inf")] * (kind in (6, 12)))
    value = draw(st.sampled_from(odd))
    return numbers(kind, [value] * count) if array else number(kind, value)


@FUZZ
@given(data=st.data())
def test_values_of_any_type(valid: Path, tmp_path: Path, data: st.DataObject) -> None:
    length = len(read_header(valid).metadata["tokenizer.ggml.tokens"])
    changes = {key: data.draw(values(length)) for key in data.draw(st.sets(st.sampled_from(KEYS), max_size=2))}
    if data.draw(st.booleans()):
        changes.setdefault("tokenizer.ggml.model", said("llama"))
        changes.setdefault("tokenizer.ggml.scores", numbers(6, [0.0] * length))
    message = outcome(write(tmp_path / "changed.gguf", valid, changes))
    assert str(tmp_path) not in message
    assert all(line.startswith("changed.gguf: ") for line in message.splitlines())


FIVE = number(4, 5)
CASES = {
    "tokens": ("tokenizer.ggml.tokens", FIVE),
    "flags_as_tokens": ("tokenizer.ggml.tokens", struct.pack("<IIQ", ARRAY, BOOL, 2) + bytes(2)),
    "kinds": ("tokenizer.ggml.token_type", FIVE),
    "kind_texts": ("tokenizer.ggml.token_type", texts(["a"])),
    "merges": ("tokenizer.ggml.merges", FIVE),
    "template": ("tokenizer.chat_template", FIVE),
    "hot": ("general.sampling.temp", said("hot")),
    "nan": ("general.sampling.top_p", number(6, float("nan"))),
    "top_k": ("general.sampling.top_k", number(5, -5)),
    "many": ("general.sampling.min_p", numbers(6, [0.1])),
}


@pytest.mark.parametrize("name", CASES)
def test_another_type_is_refused_by_its_key(valid: Path, tmp_path: Path, name: str) -> None:
    key, value = CASES[name]
    message = outcome(write(tmp_path / "bad.gguf", valid, {key: value}))
    assert f"bad.gguf: {key} " in message


def test_scores_must_be_numbers(valid: Path, tmp_path: Path) -> None:
    for value in (FIVE, texts(["a"] * 330)):
        changes = {"tokenizer.ggml.model": said("llama"), "tokenizer.ggml.scores": value}
        assert "bad.gguf: tokenizer.ggml.scores must be" in outcome(write(tmp_path / "bad.gguf", valid, changes))


def test_a_template_by_name_must_be_text(valid: Path, tmp_path: Path) -> None:
    changes = {"tokenizer.chat_templates": texts(["a"]), "tokenizer.chat_template.a": FIVE}
    assert "tokenizer.chat_template.a must be text" in outcome(write(tmp_path / "bad.gguf", valid, changes))
    assert outcome(write(tmp_path / "good.gguf", valid, changes | {"tokenizer.chat_template.a": said("{{ 1 }}")})) == ""
