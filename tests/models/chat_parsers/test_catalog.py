"""Which dialect a model gets, by name and by what its template says."""

import importlib.metadata
import re
from pathlib import Path

import pytest

from troupellm.models.chat_parsers import catalog
from troupellm.models.chat_parsers.catalog import REASONING_PARSERS, TOOL_PARSERS, chat_syntax_named, choose
from troupellm.models.chat_parsers.forced_calls import calls_guide
from troupellm.models.chat_parsers.hermes import HERMES
from troupellm.protocol.errors import ConfigError
from troupellm.protocol.params.tools import tool_use


@pytest.mark.parametrize(
    ("kind", "template", "names"),
    [
        ("llama", "{{ x }} <tool_call> {{ y }}", ("hermes", "none")),
        ("qwen3", "<tool_call> ... <think>\n\n</think>", ("hermes", "qwen3")),
        ("qwen3_moe", "<tool_call>\n<function=a>\n<parameter=b>", ("qwen3_coder", "none")),
        ("llama", "Environment: ipython <|python_tag|>", ("llama3_json", "none")),
        ("llama4", "<|header_start|>", ("llama4_pythonic", "none")),
        ("mistral", "[INST] [TOOL_CALLS] [", ("mistral", "none")),
        ("mistral3", "[TOOL_CALLS]name[ARGS] [THINK]", ("mistral_v11", "mistral")),
        ("granite", "<|tool_call|> <|start_of_role|>", ("granite", "none")),
        ("granitemoehybrid", "<tool_call>", ("hermes", "none")),
        ("granite", "<|tool_call|> Here is my thought process", ("granite", "granite")),
        ("granite", "<|start_of_role|> <think> <response>", ("granite", "granite")),
        ("phi3", "<|tool|> <think>", ("phi4_mini_json", "qwen3")),
        ("deepseek_v3", "<｜Assistant｜><｜tool▁calls▁begin｜>```json</think>", ("deepseek_v3", "deepseek_r1")),
        (
            "deepseek_v3",
            "<｜Assistant｜><｜tool▁calls▁begin｜> {% if thinking %}</think>",
            ("deepseek_v31", "deepseek_v3"),
        ),
        ("kimi_k2", "<|tool_calls_section_begin|>", ("kimi_k2", "none")),
        ("glm4_moe", "<tool_call>{{n}}<arg_key> </think>", ("glm45", "qwen3")),
        ("gpt_oss", "<|start|>assistant<|channel|>final<|message|>", ("openai", "openai_gptoss")),
        ("internlm2", "<|action_start|><|plugin|>", ("internlm", "none")),
        ("phi3", "<|tool|>", ("phi4_mini_json", "none")),
        ("llama", "{{ messages }}", ("none", "none")),
    ],
)
def test_a_template_tells_its_dialect(kind: str, template: str, names: tuple[str, str]):
    assert choose("auto", "auto", kind, template) == names
    chat_syntax_named(*names)


def test_a_name_given_wins_over_the_template():
    assert choose("mistral", "none", "qwen3", "<tool_call></think>") == ("mistral", "none")


@pytest.mark.parametrize(
    ("tools", "reasoning", "field"), [("nope", "none", "tool_call_parser"), ("none", "nope", "reasoning_parser")]
)
def test_a_name_that_nobody_has_is_refused_with_those_there_are(tools: str, reasoning: str, field: str):
    with pytest.raises(ConfigError, match="must be one of auto, none, ") as caught:
        chat_syntax_named(tools, reasoning)
    assert caught.value.param == field


class _Entry:
    def __init__(self, name: str, found: object) -> None:
        self.name = name
        self._found = found

    def load(self) -> object:
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


def test_plug_ins_are_found_by_their_names(monkeypatch: pytest.MonkeyPatch):
    entries = [_Entry("mine", HERMES), _Entry("broken", RuntimeError("oh")), _Entry("wrong", 3)]
    monkeypatch.setattr(catalog, "entry_points", lambda group: entries if group == "troupellm.dialects" else [])
    assert chat_syntax_named("mine", "none").calls is HERMES
    with pytest.raises(ConfigError, match="plug-in broken cannot be loaded"):
        chat_syntax_named("broken", "none")
    with pytest.raises(ConfigError, match="mine"):
        chat_syntax_named("wrong", "none")
    assert importlib.metadata.entry_points(group="troupellm.dialects") is not None


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_every_syntax_can_be_forced(name: str):
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
    guide = calls_guide(chat_syntax_named(name, "none"), tool_use(tools, "required"), after="")
    assert guide is not None
    assert guide.kind == "structural_tag"


@pytest.mark.parametrize("name", sorted(REASONING_PARSERS))
def test_every_reasoning_parser_goes_with_every_tool_parser(name: str):
    for tools in TOOL_PARSERS:
        chat_syntax_named(tools, name)


def test_the_documents_name_every_parser():
    text = (Path(__file__).parents[3] / "docs" / "tools-and-reasoning.md").read_text("utf-8")
    calls, reasoning = (text.split(f"{kind} parsers: ")[1].split("\n")[0] for kind in ("Tool call", "Reasoning"))
    assert set(re.findall(r"`([^`]+)`", calls)) == set(TOOL_PARSERS)
    assert set(re.findall(r"`([^`]+)`", reasoning)) == set(REASONING_PARSERS)
