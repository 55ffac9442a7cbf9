"""Descriptions by name, vLLM's names among them, and which one a model is likely to need."""

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, Final

from troupellm.models.dialects.deepseek import DEEPSEEK_R1, DEEPSEEK_THINK, DEEPSEEK_V3, DEEPSEEK_V31
from troupellm.models.dialects.glm import GLM4, GLM45
from troupellm.models.dialects.granite import GRANITE, GRANITE_FUNCTIONS, GRANITE_THINK
from troupellm.models.dialects.hermes import HERMES, THINK
from troupellm.models.dialects.internlm import INTERNLM
from troupellm.models.dialects.kimi import KIMI_K2, KIMI_THINK
from troupellm.models.dialects.llama import LFM2, LLAMA_JSON, PYTHONIC
from troupellm.models.dialects.mistral import MISTRAL, MISTRAL_NEW, MISTRAL_THINK
from troupellm.models.dialects.phi import PHI4_MINI
from troupellm.models.dialects.plan import plan_of
from troupellm.models.dialects.qwen import QWEN_CODER
from troupellm.models.dialects.syntax import CallSyntax, Channels, Dialect, Thinking
from troupellm.protocol.errors import ConfigError

AUTO: Final = "auto"
NONE: Final = "none"
PLUGINS: Final = "troupellm.dialects"
"""Entry points: objects of `CallSyntax`, `Thinking` or `Channels`, under the name by which they are asked for."""

_GPT_OSS: Final = Channels()

TOOL_PARSERS: Final[Mapping[str, CallSyntax | Channels]] = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "glm4": GLM4,
    "glm45": GLM45,
    "glm47": GLM45,
    "granite": GRANITE,
    "granite-20b-fc": GRANITE_FUNCTIONS,
    "granite4": HERMES,
    "hermes": HERMES,
    "internlm": INTERNLM,
    "kimi_k2": KIMI_K2,
    "lfm2": LFM2,
    "llama3_json": LLAMA_JSON,
    "llama4_json": LLAMA_JSON,
    "llama4_pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "mistral_v11": MISTRAL_NEW,
    "openai": _GPT_OSS,
    "phi4_mini_json": PHI4_MINI,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN_CODER,
    "qwen3_json": HERMES,
    "qwen3_xml": QWEN_CODER,
    "troupe": HERMES,
}
REASONING_PARSERS: Final[Mapping[str, Thinking | Channels]] = {
    "deepseek_r1": DEEPSEEK_R1,
    "deepseek_v3": DEEPSEEK_THINK,
    "glm45": THINK,
    "granite": GRANITE_THINK,
    "kimi_k2": KIMI_THINK,
    "mistral": MISTRAL_THINK,
    "openai_gptoss": _GPT_OSS,
    "qwen3": THINK,
}

Facts = tuple[str, str]
"""A model's type, and the text of its chat templates."""

# The first rule that holds wins: what a template says counts more than the type, which many share.
_TOOL_RULES: Final[tuple[tuple[str, Callable[[str, str], bool]], ...]] = (
    ("openai", lambda kind, template: "<|channel|>" in template and "<|message|>" in template),
    ("mistral_v11", lambda kind, template: "[TOOL_CALLS]" in template and "[ARGS]" in template),
    ("mistral", lambda kind, template: "[TOOL_CALLS]" in template),
    ("deepseek_v3", lambda kind, template: "<｜tool▁calls▁begin｜>" in template and "```json" in template),
    ("deepseek_v31", lambda kind, template: "<｜tool▁calls▁begin｜>" in template),
    ("kimi_k2", lambda kind, template: "<|tool_calls_section_begin|>" in template),
    ("glm45", lambda kind, template: "<arg_key>" in template),
    ("qwen3_coder", lambda kind, template: "<function=" in template and "<parameter=" in template),
    ("granite", lambda kind, template: kind.startswith("granite") and "<tool_call>" not in template),
    ("phi4_mini_json", lambda kind, template: kind.startswith("phi") and "<|tool" in template),
    ("hermes", lambda kind, template: "<tool_call>" in template),
    ("llama4_pythonic", lambda kind, template: "<|python_start|>" in template or kind.startswith("llama4")),
    ("lfm2", lambda kind, template: "<|tool_call_start|>" in template),
    ("llama3_json", lambda kind, template: "<|python_tag|>" in template or "ipython" in template),
    ("internlm", lambda kind, template: "<|action_start|>" in template),
    ("glm4", lambda kind, template: kind in ("chatglm", "glm", "glm4") and "<|observation|>" in template),
)
_REASONING_RULES: Final[tuple[tuple[str, Callable[[str, str], bool]], ...]] = (
    ("openai_gptoss", lambda kind, template: "<|channel|>" in template and "<|message|>" in template),
    ("mistral", lambda kind, template: "[THINK]" in template or ("[INST]" in template and "</think>" in template)),
    ("granite", lambda kind, template: "Here is my thought process" in template),
    ("none", lambda kind, template: "think>" not in template),
    ("granite", lambda kind, template: kind.startswith("granite")),
    ("kimi_k2", lambda kind, template: "<|tool_calls_section_begin|>" in template),
    ("deepseek_v3", lambda kind, template: "<｜Assistant｜>" in template and "thinking" in template),
    ("deepseek_r1", lambda kind, template: "<｜Assistant｜>" in template),
    ("qwen3", lambda kind, template: True),
)


def choose(tool_parser: str, reasoning_parser: str, model_type: str, template: str) -> tuple[str, str]:
    """The names that "auto" stands for; "none" where nothing fits.

    Args:
        model_type: as config.json has it.
        template: text of the model's chat templates.
    """
    tools, reasoning = tool_parser or NONE, reasoning_parser or NONE
    if tools == AUTO:
        tools = next((name for name, holds in _TOOL_RULES if holds(model_type, template)), NONE)
    if reasoning == AUTO:
        reasoning = next(name for name, holds in _REASONING_RULES if holds(model_type, template))
    return tools, reasoning


def dialect_named(tool_parser: str, reasoning_parser: str) -> Dialect:
    """The description that two names make together.

    Raises:
        ConfigError: there is no such name, or a plug-in's description cannot be used.
    """
    calls = _find(tool_parser, TOOL_PARSERS, (CallSyntax, Channels), "tool_call_parser")
    thinking = _find(reasoning_parser, REASONING_PARSERS, (Thinking, Channels), "reasoning_parser")
    channels = next((found for found in (calls, thinking) if isinstance(found, Channels)), None)
    dialect = Dialect(
        thinking=thinking if isinstance(thinking, Thinking) and channels is None else None,
        calls=calls if isinstance(calls, CallSyntax) and channels is None else None,
        channels=channels,
    )
    try:
        plan_of(dialect)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the dialect {tool_parser}, {reasoning_parser}: {error}", param="tool_call_parser"
        ) from error
    return dialect


def _find(name: str, known: Mapping[str, Any], kinds: tuple[type, ...], field: str) -> object:
    if name == NONE:
        return None
    if name in known:
        return known[name]
    offered = set(known)
    for entry in entry_points(group=PLUGINS):
        offered.add(entry.name)
        if entry.name == name:
            try:
                found = entry.load()
            except Exception as error:  # somebody else's module may raise anything
                raise ConfigError(f"{field}: the plug-in {name} cannot be loaded: {error}", param=field) from error
            if isinstance(found, kinds):
                return found
    names = ", ".join([AUTO, NONE, *sorted(offered)])
    raise ConfigError(f"{field} must be one of {names}; got {name!r}", param=field)
