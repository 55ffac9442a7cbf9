"""`get_tokenizer` answers a script as the tokenizer of transformers does."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from troupellm import LLM, EngineArgs, InvalidRequest, LLMEngine
from troupellm.actors.llm.script_tokenizer import ScriptTokenizer
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.tests.support.checkpoints import text_models

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}{% if quiet is defined %}!{% endif %}"
)
FOLDERS: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "byte level": (text_models.byte_level, {"eos_token": "<|end|>", "pad_token": "<|start|>"}),
    "byte fallback": (
        text_models.byte_fallback,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"},
    ),
}
TEXTS = ["the quick fox", "", "naïve 🎉 <s> fox</s>", "a <|end|> b <tool call>"]
CHAT = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "a"}]
TOOLS = [{"type": "function", "function": {"name": "dig", "parameters": {}}}]
NAMES = [f"{name}_token{suffix}" for name in ("bos", "eos", "unk", "pad") for suffix in ("", "_id")]
CALLS: dict[str, Callable[[Any], Any]] = {
    "sizes": lambda given: (given.vocab_size, len(given), given.is_fast),
    "special tokens": lambda given: [getattr(given, name) for name in NAMES],
    "all special ids": lambda given: sorted(given.all_special_ids),
    "vocabulary": lambda given: (given.get_vocab(), given.get_added_vocab()),
    "encode": lambda given: [given.encode(text) for text in TEXTS],
    "encode without special tokens": lambda given: [given.encode(text, add_special_tokens=False) for text in TEXTS],
    "encode and cut": lambda given: [given.encode(text, truncation=True, max_length=3) for text in TEXTS],
    "call": lambda given: (given(TEXTS[0]).input_ids, given(TEXTS[0])["attention_mask"]),
    "call with many": lambda given: (given(TEXTS)["input_ids"], given(TEXTS).attention_mask),
    "tokenize": lambda given: [given.tokenize(text) for text in TEXTS],
    "decode": lambda given: [given.decode(given.encode(text)) for text in TEXTS],
    "decode one": lambda given: given.decode(given.encode("the")[-1]),
    "decode without special tokens": lambda given: given.decode(given.encode(TEXTS[2]), skip_special_tokens=True),
    "batch decode": lambda given: given.batch_decode([given.encode(text) for text in TEXTS], skip_special_tokens=True),
    "ids of tokens": lambda given: (given.convert_tokens_to_ids("the"), given.convert_tokens_to_ids(["a", "nothing"])),
    "tokens of ids": lambda given: (given.convert_ids_to_tokens(5), given.convert_ids_to_tokens([5, 6])),
    "template text": lambda given: given.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True),
    "template ids": lambda given: given.apply_chat_template(CHAT, return_dict=False),
    "template dict": lambda given: given.apply_chat_template(CHAT, return_dict=True)["input_ids"],
    "template of many": lambda given: given.apply_chat_template([CHAT, CHAT[:1]], tokenize=False),
    "template with tools": lambda given: given.apply_chat_template(CHAT, tools=TOOLS, tokenize=False, quiet=True),
    "template of its own": lambda given: given.apply_chat_template(CHAT, chat_template="x", tokenize=False),
    "template source": lambda given: given.chat_template,
}


@pytest.fixture(params=FOLDERS, scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ScriptTokenizer]:
    """The tokenizer of transformers and ours, of the same folder."""
    write, settings = FOLDERS[request.param]
    folder = write(tmp_path_factory.mktemp("tokenizer"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return AutoTokenizer.from_pretrained(str(folder)), script_tokenizer(folder)


def script_tokenizer(folder: Path) -> ScriptTokenizer:
    return ScriptTokenizer(Tokenizer.load(folder), ChatTemplate.load(folder, None), 100)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_answers_as_that_of_transformers(pair: tuple[Any, ScriptTokenizer], name: str) -> None:
    theirs, ours = pair
    assert CALLS[name](ours) == CALLS[name](theirs)


def test_a_script_may_assign_a_template_and_special_tokens(tmp_path: Path) -> None:
    folder = text_models.byte_level(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    found = []
    for given in (AutoTokenizer.from_pretrained(str(folder)), script_tokenizer(folder)):
        given.pad_token = given.eos_token
        given.chat_template = "{{ messages[0].content }}{{ eos_token }}"
        found.append((given.pad_token_id, given.apply_chat_template(CHAT, tokenize=False)))
    assert found[0] == found[1] == (0, "the fox<|end|>")


def test_a_text_may_be_cut_to_the_context(pair: tuple[Any, ScriptTokenizer]) -> None:
    _, ours = pair
    assert ours.encode("the fox " * 100, truncation=True) == ours.encode("the fox " * 100)[: ours.model_max_length]
    assert len(ours.encode("the fox " * 100, truncation=False, max_length=5)) > 100


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ours: ours.encode("a", max_length=0), "max_length must be at least 1, got 0"),
        (lambda ours: ours.encode(5), "prompt must be text"),
        (lambda ours: ours.encode("\ud800"), "half of a surrogate pair"),
        (lambda ours: ours.apply_chat_template([]), "messages must not be empty"),
        (lambda ours: ours.apply_chat_template(CHAT, tools=[print]), "tools must be JSON descriptions"),
        (lambda ours: ours.apply_chat_template(CHAT, messages=CHAT), "must not set 'messages'"),
        (lambda ours: ours.apply_chat_template(CHAT, return_tensors="pt"), "must not set 'return_tensors'"),
    ],
)
def test_a_wrong_value_is_named(pair: tuple[Any, ScriptTokenizer], call: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        call(pair[1])


def test_scripts_get_it_from_an_engine(model_folder: Path, fake_worker: Any) -> None:
    with LLM(model_folder, worker=lambda folder: fake_worker) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer.decode(tokenizer.encode("hi")) == "hi"
        assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "user:the fox;assistant:a;"
        assert tokenizer.model_max_length == llm.engine.limits.max_model_len
        assert llm.get_tokenizer() is tokenizer


@pytest.mark.slow
def test_a_stepped_engine_has_it_too() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs())
    try:
        tokenizer = engine.get_tokenizer()
        assert tokenizer.decode(tokenizer.encode("hi"), skip_special_tokens=True).strip() == "hi"
    finally:
        engine.shutdown()
