"""A served model's chat syntax, and the chat parser of one request: the settings by which its answer is parsed and
guided."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from troupellm.models.chat_parsers.catalog import AUTO, HF, NONE, chat_syntax_named, choose
from troupellm.models.chat_parsers.compiled_syntax import plan_of
from troupellm.models.chat_parsers.forced_calls import ReasoningPairs, calls_guide, calls_or, may_think
from troupellm.models.chat_parsers.harmony import opened_channel
from troupellm.models.chat_parsers.offered_tools import OfferedTools
from troupellm.models.chat_parsers.parser import NO_LIMIT, Parser
from troupellm.models.chat_parsers.prompt_start import Start, rendered_ending, start_of
from troupellm.models.chat_parsers.reasoning_tokens import ReasoningCount, ReasoningMarks
from troupellm.models.chat_parsers.response_template import compiled
from troupellm.models.chat_parsers.stop_scope import stop_scope
from troupellm.models.chat_parsers.syntax import ChatSyntax, Thinking, marks_of
from troupellm.models.chat_parsers.template_endings import Openings
from troupellm.models.chat_template.message_forms import text_of
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.config.model_documents import read_json
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.errors import ConfigError, InvalidRequest
from troupellm.protocol.messages.input import ChatPrompt
from troupellm.protocol.params.guide import GuideSpec
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.protocol.params.sampling_checks import StopScope, ThinkingMarks
from troupellm.protocol.params.tools import NO_TOOLS, ToolUse

logger = logging.getLogger("troupellm.models")
Token = Callable[[int], str]
"""Makes a new name of twice the given number of hexadecimal digits."""
Begins = Callable[[Sequence[int]], tuple[Start, str]]
"""Returns the state (see `Start`) in which a prompt of these tokens ends, and its channel."""
_SUFFIXED: Final = re.compile(r"<tool_calls(:[^<>]{1,64})>")
_FORMAT: Final = "response_format"
"""Says what a text looks like, and nothing where the answer must be a call."""


class ChatParser:
    """The parser of one request's answers, and their guide."""

    def __init__(
        self,
        chat_syntax: ChatSyntax,
        special: Mapping[str, int],
        marks: ReasoningMarks | None,
        use: ToolUse,
        token: Token,
        *,
        start: Start,
        channel: str,
        guide: GuideSpec | None,
        after: str,
        pairs: ReasoningPairs,
        show_reasoning: bool,
        begins: Begins | None = None,
    ) -> None:
        """
        Args:
            start: where a template like that of the prompt leaves off.
            begins: where the rendered prompt does.
        """
        self.kept_token_ids = tuple(sorted(special.values()))
        """Special tokens that must be in the text, since they are marks."""
        self.guide = guide
        """The guide that makes the answer call tools."""
        self.after = after
        """The text that ends thinking, if the answer begins with reasoning."""
        self._pairs = pairs
        self.show_reasoning = show_reasoning
        self._chat_syntax = chat_syntax
        self._marks = marks
        self._start = start
        self._channel = channel
        self._use = use
        self._token = token
        self._begins = begins
        self._style = chat_syntax.calls.ids if chat_syntax.calls else "hex"
        self._plan = plan_of(chat_syntax, frozenset(special))
        self._offered_tools = OfferedTools(use.tools)

    @property
    def thinking(self) -> ThinkingMarks | None:
        """The marks by which a budget for thinking is kept."""
        marks = self._marks
        if marks is None:
            return None
        inside = {"thinking": True, "answer": False, "free": True if marks.always else None}[self._start]
        return ThinkingMarks(start=marks.opens, end=marks.closes, open=inside)

    def applied(self, params: SamplingParams) -> SamplingParams:
        """The parameters, with additions for parsing the answers.

        Raises:
            InvalidRequest: the answer shall call tools and look otherwise, too.
        """
        guide = params.guide
        if guide is not None and self._use.required and not guide.field.startswith(_FORMAT):
            raise InvalidRequest(f"{guide.field} and tool_choice exclude each other", param=guide.field)
        if guide is None or self._use.required:
            guide = self.guide
        else:
            if self._use.tools:
                guide = calls_or(self._chat_syntax, self._use, guide)
            guide = self._behind_reasoning(guide)
        if guide is not None:  # it was made for this beginning, and lets through no other
            self._begins = None
        return msgspec.structs.replace(
            params,
            guide=guide,
            kept_token_ids=self.kept_token_ids or None,
            stop_scope=self._stop_scope() if params.stop else None,
            thinking=self.thinking if params.thinking is None else params.thinking,
        )

    def _stop_scope(self) -> StopScope | None:
        inside = None
        if self._begins is None:
            always = self._marks is not None and self._marks.always
            inside = self._start == "thinking" or (always and self._start == "free")
        return stop_scope(self._chat_syntax, self._use.tools, inside=inside)

    def _behind_reasoning(self, guide: GuideSpec) -> GuideSpec:
        if self._pairs:
            found = may_think(guide, self._pairs)
            if found is not None:
                return found
        after = self.after or (self._pairs[0][1] if self._pairs else "")
        return msgspec.structs.replace(guide, after=after) if after else guide

    def new_parser(self, prompt_token_ids: Sequence[int] = ()) -> Parser:
        """For one choice.

        Args:
            prompt_token_ids: of the rendered prompt; empty where it is not known.
        """
        self._look_at(prompt_token_ids)
        return Parser(
            self._plan,
            offered_tools=self._offered_tools,
            new_id=self._new_id,
            start=self._start,
            channel=self._channel,
            with_calls=bool(self._use.tools),
            most_calls=NO_LIMIT if self._use.parallel else 1,
            forced=self._use.required,
        )

    def _look_at(self, prompt_token_ids: Sequence[int]) -> None:
        if self._begins is not None and prompt_token_ids:
            (self._start, self._channel), self._begins = self._begins(prompt_token_ids), None

    def new_count(self, prompt_token_ids: Sequence[int] = ()) -> ReasoningCount | None:
        """Counts the tokens of one choice's reasoning; None where the model does not think."""
        if self._marks is None:
            return None
        self._look_at(prompt_token_ids)
        return self._marks.count(inside=self._start == "thinking" or (self._marks.always and self._start != "answer"))

    def _new_id(self, number: int, name: str) -> str:
        if self._style == "alphanumeric":
            return self._token(5)[:9]
        if self._style == "numbered":
            return f"functions.{name}:{number}"
        return f"call_{self._token(12)}"


class ChatFormat:
    """A chat syntax together with the tokenizer and the template of the model that speaks it."""

    def __init__(self, chat_syntax: ChatSyntax, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.chat_syntax = chat_syntax
        self.tokenizer = tokenizer
        self.template = template
        thinking = chat_syntax.thinking
        self._openings = Openings(
            template, thinking.switches if thinking else (), wanted=bool(thinking or chat_syntax.channels)
        )
        special = {
            text: token_id
            for token_id in tokenizer.special_token_ids
            if (text := tokenizer.token_bytes(token_id).decode("utf-8", "replace"))
        }
        self._thinking_only = ChatSyntax(thinking=chat_syntax.thinking, channels=chat_syntax.channels)
        self._special = _marks_among(special, chat_syntax)
        self._special_of_reasoning = _marks_among(special, self._thinking_only)
        self._marks = ReasoningMarks.of(chat_syntax, tokenizer)

    @property
    def thinks(self) -> bool:
        """True if the model's reasoning can be distinguished from its answers, and can have a budget."""
        return self._marks is not None

    @property
    def thinking(self) -> ThinkingMarks | None:
        """The marks by which a budget for thinking is kept in a text that no template has begun."""
        marks = self._marks
        return None if marks is None else ThinkingMarks(start=marks.opens, end=marks.closes)

    def chat_parser(
        self, prompt: ChatPrompt, use: ToolUse = NO_TOOLS, *, token: Token, show_reasoning: bool = True
    ) -> ChatParser | None:
        """How to read the answers to a prompt; None where they are plain text.

        Raises:
            InvalidRequest: calls must be made, and the model has no syntax for them.
        """
        chat_syntax = self.chat_syntax if use.tools else self._thinking_only
        start, channel = self._start(prompt)
        after, pairs = self._after(start, channel), self._pairs(prompt, start)
        guide = None
        if use.tools:
            effort = (prompt.template_kwargs or {}).get("reasoning_effort")
            guide = calls_guide(self.chat_syntax, use, after=after, marks=pairs, reasoning=effort != "none")
        if chat_syntax.thinking is None and chat_syntax.calls is None and chat_syntax.channels is None:
            return None
        return ChatParser(
            chat_syntax,
            self._special if use.tools else self._special_of_reasoning,
            self._marks,
            use,
            token,
            start=start,
            channel=channel,
            guide=guide,
            after=after,
            pairs=pairs,
            begins=None if prompt.continue_final_message else partial(self._begins, prompt),
            show_reasoning=show_reasoning,
        )

    def knows_opening(self, kwargs: Mapping[str, Any] | None) -> bool:
        """True if `chat_parser` need not render the template, which waits for another process."""
        if self.chat_syntax.thinking is None and self.chat_syntax.channels is None:
            return True  # answers have one part, and no opening is looked at
        return self._openings.knows(kwargs or {})

    def with_effort(self, kwargs: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any] | None:
        """Template variables that set the thinking effort; variables that the request sets itself stay."""
        if effort is None:
            return None if kwargs is None else dict(kwargs)
        thinking = self.chat_syntax.thinking
        switches = thinking.switches if thinking else ()
        wanted: dict[str, Any] = dict.fromkeys(switches, effort != "none")
        said = thinking.off_effort if thinking and effort == "none" else effort
        return wanted | {"reasoning_effort": said} | dict(kwargs or {})

    def _start(self, prompt: ChatPrompt) -> tuple[Start, str]:
        """The state in which the prompt ends, and the channel of the message that it ends with."""
        thinking, channels = self.chat_syntax.thinking, self.chat_syntax.channels
        if thinking is None and channels is None:
            return "free", ""
        if prompt.continue_final_message:
            ending = text_of(prompt.messages[-1].get("content")) if prompt.messages else ""
            if thinking is not None:
                opened = max(ending.rfind(mark) for mark in thinking.opens)
                closed = max(ending.rfind(mark) for mark in thinking.closes)
                return ("thinking" if opened > closed else "answer"), ""
            return "free", "final"
        seen = prompt.add_generation_prompt and prompt.template is None
        ending = self._openings.of(prompt.template_kwargs or {}).rstrip() if seen else ""
        if channels is not None:
            return "free", opened_channel(ending, channels)
        assert thinking is not None, "one of both"
        if ending.endswith(thinking.opens):
            return "thinking", ""
        return ("answer" if ending.endswith(thinking.closes) else "free"), ""

    def _begins(self, prompt: ChatPrompt, token_ids: Sequence[int]) -> tuple[Start, str]:
        """The state in which a rendered prompt ends, and the channel of the message that it ends with."""
        thinking, channels = self.chat_syntax.thinking, self.chat_syntax.channels
        if channels is not None:
            marks = [channels.start, channels.channel, channels.constrain, channels.message]
        else:
            marks = [*thinking.opens, *thinking.closes] if thinking else []
        if not marks or not prompt.add_generation_prompt:
            return "free", ""
        ending = rendered_ending(self.tokenizer, token_ids, prompt.messages, marks)
        if channels is not None:
            return "free", opened_channel(ending.rstrip(), channels)
        assert thinking is not None, "one of both"
        return start_of(ending, thinking.opens, thinking.closes), ""

    def _after(self, start: Start, channel: str) -> str:
        """The text that ends thinking; empty where the answer may begin at once."""
        channels = self.chat_syntax.channels
        if channels is not None:
            begun = channel not in ("", *channels.reasoning)
            return "" if begun else f"{channels.channel}final{channels.message}"
        thinking = self.chat_syntax.thinking
        if thinking is None or start == "answer":
            return ""
        return thinking.closes[0] if start == "thinking" or thinking.begins == "always" else ""

    def _pairs(self, prompt: ChatPrompt, start: Start) -> ReasoningPairs:
        """The marks around reasoning with which the answer may begin, and need not: models skip them, too."""
        thinking = self.chat_syntax.thinking
        if thinking is None or self.chat_syntax.channels is not None or start != "free" or thinking.begins == "always":
            return ()
        if not _switched_on(thinking, prompt.template_kwargs or {}):
            return ()
        last = len(thinking.closes) - 1
        return [(mark, thinking.closes[min(index, last)]) for index, mark in enumerate(thinking.opens)]


def chat_format_of(model: ModelConfig, tokenizer: Tokenizer, template: ChatTemplate, folder: Path) -> ChatFormat:
    """The chat format of a model, as its configuration names it, or as its chat template shows.

    Args:
        folder: of the tokenizer, where mostly there is a config.json too.

    Raises:
        ConfigError: a name that does not exist, or a `response_template` that was asked for and cannot be read.
    """
    kind = read_json(folder / "config.json").get("model_type")
    texts = "\n".join(template.sources.values())
    tools, reasoning = choose(
        model.tool_call_parser, model.reasoning_parser, kind if isinstance(kind, str) else "", texts
    )
    settings = read_json(folder / "tokenizer_config.json")
    suffix = _suffix(settings, tokenizer)
    if "response_template" in settings and (HF in (tools, reasoning) or (tools == NONE and AUTO in _asked(model))):
        own_tools = HF if tools == NONE and model.tool_call_parser == AUTO else tools
        own_reasoning = HF if reasoning == NONE and model.reasoning_parser == AUTO else reasoning
        try:
            own = compiled(settings["response_template"])
            return ChatFormat(chat_syntax_named(own_tools, own_reasoning, suffix, own), tokenizer, template)
        except ConfigError as error:
            if HF in _asked(model):
                raise
            logger.warning("the tokenizer's response_template is not used: %s", error)
    return ChatFormat(chat_syntax_named(tools, reasoning, suffix), tokenizer, template)


def _asked(model: ModelConfig) -> tuple[str | None, str | None]:
    return model.tool_call_parser, model.reasoning_parser


def _suffix(settings: Mapping[str, Any], tokenizer: Tokenizer) -> str:
    """The suffix of the marks of a tokenizer: its own `token_suffix`, else the one in its vocabulary."""
    said = settings.get("token_suffix")
    if isinstance(said, str):
        return said
    found = next((match for text in tokenizer.added_tokens if (match := _SUFFIXED.fullmatch(text))), None)
    return found[1] if found else ""


def _switched_on(thinking: Thinking, kwargs: Mapping[str, Any]) -> bool:
    given = [bool(kwargs[switch]) for switch in thinking.switches if switch in kwargs]
    return given[0] if given else thinking.default_on


def _marks_among(special: Mapping[str, int], chat_syntax: ChatSyntax) -> dict[str, int]:
    """The special tokens that are marks of a chat syntax, or part of one."""
    marks = marks_of(chat_syntax)
    return {text: token_id for text, token_id in special.items() if any(text in mark for mark in marks)}
