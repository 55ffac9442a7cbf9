"""Dialect descriptions by name, vLLM's names among them, and the choice of one for a model."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Final

from troupellm.models.chat_parsers import deepseek, json_formats, minimax, tag_formats
from troupellm.models.chat_parsers.auto_rules import REASONING_RULES, TOOL_RULES
from troupellm.models.chat_parsers.compiled_syntax import plan_of
from troupellm.models.chat_parsers.glm import GLM4, GLM45, LING_THINK
from troupellm.models.chat_parsers.granite import GRANITE, GRANITE_FUNCTIONS, GRANITE_THINK
from troupellm.models.chat_parsers.hermes import HERMES, THINK
from troupellm.models.chat_parsers.internlm import INTERNLM
from troupellm.models.chat_parsers.kimi import KIMI_K2, KIMI_THINK
from troupellm.models.chat_parsers.llama import LFM2, LLAMA_JSON, PYTHONIC
from troupellm.models.chat_parsers.mistral import MISTRAL, MISTRAL_NEW, MISTRAL_THINK
from troupellm.models.chat_parsers.phi import PHI4_MINI
from troupellm.models.chat_parsers.qwen import QWEN_CODER
from troupellm.models.chat_parsers.response_template import ResponseTemplate
from troupellm.models.chat_parsers.syntax import CallSyntax, Channels, ChatSyntax, Thinking, with_suffix
from troupellm.protocol.errors import ConfigError

AUTO: Final = "auto"
NONE: Final = "none"
HF: Final = "hf"
"""The tokenizer's own `response_template`."""
PLUGINS: Final = "troupellm.dialects"
"""Entry points: objects of `CallSyntax`, `Thinking` or `Channels`, under the name by which they are asked for."""

_GPT_OSS: Final = Channels()

TOOL_PARSERS: Final[Mapping[str, CallSyntax | Channels]] = {
    "apertus": json_formats.APERTUS,
    "cohere_command3": json_formats.COHERE,
    "cohere_command4": json_formats.COHERE,
    "deepseek_v3": deepseek.DEEPSEEK_V3,
    "deepseek_v31": deepseek.DEEPSEEK_V31,
    "deepseek_v32": deepseek.DEEPSEEK_V32,
    "deepseek_v4": deepseek.DEEPSEEK_V4,
    "deepseek_v41": deepseek.DEEPSEEK_V41,
    "dots": tag_formats.DOTS,
    "ernie45": HERMES,
    "functiongemma": json_formats.FUNCTIONGEMMA,
    "gemma4": json_formats.GEMMA4,
    "gigachat3": json_formats.GIGACHAT3,
    "glm4": GLM4,
    "glm45": GLM45,
    "glm47": GLM45,
    "granite": GRANITE,
    "granite-20b-fc": GRANITE_FUNCTIONS,
    "granite4": HERMES,
    "granite_thinking_parser": QWEN_CODER,
    "hermes": HERMES,
    "hunyuan_a13b": json_formats.JAMBA,
    "hy_v3": tag_formats.HUNYUAN,
    "hy_v4": tag_formats.HUNYUAN,
    "inkling": json_formats.INKLING,
    "internlm": INTERNLM,
    "jamba": json_formats.JAMBA,
    "k2_horizon": tag_formats.K2_HORIZON,
    "kimi_k2": KIMI_K2,
    "kimi_k3": tag_formats.KIMI_K3,
    "lfm2": LFM2,
    "ling3": GLM45,
    "llama3_json": LLAMA_JSON,
    "llama4_json": LLAMA_JSON,
    "llama4_pythonic": PYTHONIC,
    "longcat": json_formats.LONGCAT,
    "mimo": tag_formats.MIMO,
    "minicpm5": tag_formats.MINICPM5,
    "minicpmv": QWEN_CODER,
    "minimax_m2": minimax.MINIMAX_M2,
    "minimax_m3": minimax.MINIMAX_M3,
    "mistral": MISTRAL,
    "mistral_v11": MISTRAL_NEW,
    "muse": tag_formats.MUSE,
    "muse_glimmer": tag_formats.MUSE,
    "musespark1x": tag_formats.MUSE,
    "nemotron_json": json_formats.NEMOTRON_JSON,
    "nemotron_v3": QWEN_CODER,
    "olmo3": json_formats.OLMO3,
    "openai": _GPT_OSS,
    "phi4_mini_json": PHI4_MINI,
    "plamo3": json_formats.PLAMO3,
    "poolside_v1": GLM45,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN_CODER,
    "qwen3_json": HERMES,
    "qwen3_xml": QWEN_CODER,
    "seed_oss": tag_formats.SEED_OSS,
    "solar_open2": tag_formats.SOLAR_OPEN2,
    "step3": tag_formats.STEP3,
    "step3p5": QWEN_CODER,
    "step5": QWEN_CODER,
    "troupe": HERMES,
    "xlam": json_formats.XLAM,
}
REASONING_PARSERS: Final[Mapping[str, Thinking | Channels | None]] = {
    "apertus": json_formats.APERTUS_THINK,
    "cohere_command3": json_formats.COHERE3_THINK,
    "cohere_command4": json_formats.COHERE4_THINK,
    "deepseek_r1": deepseek.DEEPSEEK_R1,
    "deepseek_v3": deepseek.DEEPSEEK_THINK,
    "deepseek_v32": deepseek.DEEPSEEK_THINK,
    "deepseek_v4": deepseek.DEEPSEEK_THINK,
    "deepseek_v41": deepseek.DEEPSEEK_THINK,
    "dots": THINK,
    "ernie45": json_formats.ERNIE_THINK,
    "gemma4": json_formats.GEMMA4_THINK,
    "gigachat3": json_formats.GIGACHAT_THINK,
    "glm45": THINK,
    "glm47": THINK,
    "granite": GRANITE_THINK,
    "granite_thinking_parser": THINK,
    "holo2": deepseek.DEEPSEEK_THINK,
    "hunyuan_a13b": json_formats.ANSWER_THINK,
    "hy_v3": tag_formats.HUNYUAN_THINK,
    "hy_v4": tag_formats.HUNYUAN_THINK,
    "inkling": json_formats.INKLING_THINK,
    "k2_horizon": tag_formats.K2_THINK,
    "kimi_k2": KIMI_THINK,
    "kimi_k3": tag_formats.KIMI_K3_THINK,
    "ling3": LING_THINK,
    "longcat": json_formats.LONGCAT_THINK,
    "mimo": THINK,
    "minicpm5": THINK,
    "minicpmv": THINK,
    "minimax_m2": minimax.MINIMAX_M2_THINK,
    "minimax_m2_append_think": None,
    "minimax_m3": minimax.MINIMAX_M3_THINK,
    "mistral": MISTRAL_THINK,
    "muse": tag_formats.MUSE_THINK,
    "muse_glimmer": tag_formats.MUSE_THINK,
    "musespark1x": tag_formats.MUSE_THINK,
    "nemotron_v3": THINK,
    "olmo3": THINK,
    "openai_gptoss": _GPT_OSS,
    "plamo3": json_formats.PLAMO_THINK,
    "poolside_v1": THINK,
    "qwen3": THINK,
    "seed_oss": tag_formats.SEED_THINK,
    "solar_open2": tag_formats.SOLAR_THINK,
    "step3": tag_formats.STEP_THINK,
    "step3p5": tag_formats.STEP_THINK,
    "step5": tag_formats.STEP_THINK,
}
"""None: reasoning stays in the content."""


def choose(tool_parser: str, reasoning_parser: str, model_type: str, template: str) -> tuple[str, str]:
    """The names that "auto" stands for; "none" where nothing fits.

    Args:
        model_type: as config.json has it.
        template: text of the model's chat templates.
    """
    tools, reasoning = tool_parser or NONE, reasoning_parser or NONE
    if tools == AUTO:
        tools = next((name for name, holds in TOOL_RULES if holds(model_type, template)), NONE)
    if reasoning == AUTO:
        reasoning = next(name for name, holds in REASONING_RULES if holds(model_type, template))
    return tools, reasoning


def chat_syntax_named(
    tool_parser: str, reasoning_parser: str, suffix: str = "", own: ResponseTemplate | None = None
) -> ChatSyntax:
    """The description that two names make together.

    Args:
        suffix: added by the tokenizer to the names of its marks.
        own: the tokenizer's own description, under the name `HF`.

    Raises:
        ConfigError: there is no such name, or a plug-in's description cannot be used.
    """
    if own is None and HF in (tool_parser, reasoning_parser):
        field = "tool_call_parser" if tool_parser == HF else "reasoning_parser"
        raise ConfigError(f"{field}: the tokenizer has no response_template", param=field)
    calls = own.calls if own is not None and tool_parser == HF else _calls_named(tool_parser)
    thinking = own.thinking if own is not None and reasoning_parser == HF else _thinking_named(reasoning_parser)
    channels = next((found for found in (calls, thinking) if isinstance(found, Channels)), None)
    chat_syntax = ChatSyntax(
        thinking=thinking if isinstance(thinking, Thinking) and channels is None else None,
        calls=calls if isinstance(calls, CallSyntax) and channels is None else None,
        channels=channels,
    )
    chat_syntax = with_suffix(chat_syntax, suffix)
    try:
        plan_of(chat_syntax)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the dialect {tool_parser}, {reasoning_parser}: {error}", param="tool_call_parser"
        ) from error
    return chat_syntax


def _calls_named(name: str) -> object:
    return _find(name, TOOL_PARSERS, (CallSyntax, Channels), "tool_call_parser")


def _thinking_named(name: str) -> object:
    return _find(name, REASONING_PARSERS, (Thinking, Channels), "reasoning_parser")


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
            except Exception as error:  # a plug-in's module may raise anything
                raise ConfigError(f"{field}: the plug-in {name} cannot be loaded: {error}", param=field) from error
            if isinstance(found, kinds):
                return found
    names = ", ".join([AUTO, NONE, HF, *sorted(offered)])
    raise ConfigError(f"{field} must be one of {names}; got {name!r}", param=field)
