"""Chat templates: messages to the prompt text that the model was trained on.

A template is part of a downloaded model and so not trusted: it runs in a process of its own, under limits of processor
time and memory (`template_process`). This module chooses the template, gives it the messages in the form that it reads,
and turns its failures into errors of the request.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2.nodes

from troupellm.models.chat_template.message_forms import (
    ContentForm,
    MessageForms,
    TemplateTraits,
    all_nodes,
    content_form,
    reasoning_names,
    text_of,
)
from troupellm.models.chat_template.template_child import LONGEST_REASON, MEMORY_BYTES, environment
from troupellm.models.chat_template.template_files import read_templates
from troupellm.models.chat_template.template_process import Renderer, RendersHere, TemplateExhausted, TemplateRefused
from troupellm.models.chat_template.template_traits import PROBE_TOOLS, probed
from troupellm.protocol.errors import ContextLengthExceeded, InvalidRequest, ModelLoadError, context_sentence

RESERVED = frozenset(
    {
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
        "conversation", "tokenize", "return_tensors", "return_dict", "self", "source", "shown",
    }
)  # fmt: skip
"""Names that a caller's keyword arguments may not set, beside the special tokens."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
QUICK_SECONDS = 0.3
"""Processor time for a rendering that waits for no turn, and for a template that comes with a request."""
SECONDS_PER_TOKEN = 40e-6
"""Processor time for each token of the context; a template that looks ahead needs the square of the rounds."""
MAX_SOURCE = 65_536
"""Characters of a template that comes with a request."""
REQUEST_PROBE_SECONDS = 0.05
"""Processor time for each conversation by which a request's template is probed at its first use."""
_KEPT_TRIALS = 32
_MARK = "the-last-message"
"""Stands in for the content of a message that an answer goes on from."""


class SlowTemplate(Exception):
    """A rendering takes more than `QUICK_SECONDS`; `ChatTemplate.patient` gives it as long as it may take."""


class ChatTemplate:
    """Immutable and thread-safe. Without a template every chat is refused, with a message that says so."""

    def __init__(
        self, templates: Mapping[str, str], special_tokens: Mapping[str, str], renderer: Renderer | None = None
    ) -> None:
        """
        Args:
            templates: text by name; "default" is used unless tools are given and there is a "tool_use".
            renderer: runs the templates; by default in the calling thread, which trusts them.

        Raises:
            ModelLoadError: a template does not parse, or takes too long over the simplest chat.
        """
        self.sources = dict(templates)
        self.special_tokens = dict(special_tokens)
        self.max_messages: int | None = None
        """More are refused unrendered: each message takes one token at least."""
        self._renderer = renderer or RendersHere()
        self._seconds, self._most_seconds = QUICK_SECONDS, QUICK_SECONDS
        self._loaded = {name: self._load(name, text) for name, text in templates.items()}

    @classmethod
    def load(cls, folder: Path, override: str | None, renderer: Renderer | None = None) -> "ChatTemplate":
        """Read the model's templates, or `override`: a file, the name of one of them, or the text itself.

        Raises:
            ModelLoadError: the file is missing, a link out of the folder, or a template that does not parse.
        """
        return cls(*read_templates(folder, override, SPECIAL_TOKENS), renderer)

    @property
    def available(self) -> bool:
        """True if the model came with a template, or the settings name one."""
        return bool(self.sources)

    @property
    def patient(self) -> "ChatTemplate":
        """A copy whose renderings may take as long as the longest conversation of the model's context needs."""
        patient = copy.copy(self)
        patient._seconds = self._most_seconds
        return patient

    def fit(self, max_model_len: int) -> None:
        """Set the limits of a model with such a context, before the first request."""
        self.max_messages = max_model_len
        self._most_seconds = QUICK_SECONDS + SECONDS_PER_TOKEN * max_model_len

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        source: str | None = None,
        shown: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text.

        Args:
            continue_final_message: end the prompt with the last message's content, left open; excludes
                add_generation_prompt.
            documents: for templates that ground answers in them; the others refuse them.
            source: text of a template to use instead of the model's own.
            shown: gets the messages in the form and the order in which the template reads them.
            kwargs: further variables for the template.

        Raises:
            InvalidRequest: no template, messages that the template refuses, or a reserved keyword.
            SlowTemplate: the model's own template takes longer, and this is not `patient`.
        """
        loaded = self._choose(tools) if source is None else self._of_request(source)
        self._check(messages, continue_final_message, add_generation_prompt)
        if documents and not loaded.reads_documents:
            raise InvalidRequest(
                "documents: the chat template does not read them",
                param="documents",
                code="unsupported_parameter",
            )
        check_template_kwargs(kwargs)
        variables = {
            **self.special_tokens,
            **kwargs,
            "tools": tools or None,
            "documents": documents or None,
            "add_generation_prompt": add_generation_prompt,
        }
        own = source is None
        forms, shaped, text = self._shown(loaded, messages, variables, own=own)
        if shown is not None:
            shown += shaped
        if not continue_final_message:
            return text
        content = shaped[-1].get("content")
        mark = [{"type": "text", "text": _MARK}] if isinstance(content, list | tuple) else _MARK
        marked = forms.contents_of([*shaped[:-1], {**shaped[-1], "content": mark}])
        found = self._rendered(loaded, {**variables, "messages": marked}, own=own).rpartition(_MARK)
        return _continue(text, text_of(content), found[2] if found[1] else None)

    def _shown(
        self, loaded: "_Loaded", messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, own: bool
    ) -> tuple[MessageForms, list[dict[str, Any]], str]:
        """The text of a conversation, in the first form that the template takes, and that form.

        Raises:
            InvalidRequest, SlowTemplate: see `render`. The error is that of the usual form.
        """
        forms = loaded.forms
        shaped = forms.of(messages)
        try:
            return forms, shaped, self._rendered(loaded, {**variables, "messages": shaped}, own=own)
        except InvalidRequest as error:
            if not isinstance(error.__cause__, TemplateRefused):
                raise
            refusal, refused = error, [shaped]
        for forms in loaded.forms.plainer:
            shaped = forms.of(messages)
            if shaped in refused:
                continue
            refused.append(shaped)
            with suppress(InvalidRequest):
                return forms, shaped, self._rendered(loaded, {**variables, "messages": shaped}, own=own)
        raise refusal

    def _check(self, messages: Sequence[Any], continue_final_message: bool, add_generation_prompt: bool) -> None:
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        if self.max_messages is not None and len(messages) > self.max_messages:
            raise ContextLengthExceeded(
                f"{context_sentence(self.max_messages)} However, messages has {len(messages):,} entries.",
                limit=self.max_messages,
                got=len(messages),
                param="messages",
            )
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )

    def _rendered(self, loaded: "_Loaded", variables: Mapping[str, Any], *, own: bool) -> str:
        seconds = self._seconds if own else QUICK_SECONDS
        try:
            return self._renderer.render(loaded.source, variables, seconds)
        except TemplateRefused as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error
        except TemplateExhausted as error:
            if own and seconds < self._most_seconds:
                raise SlowTemplate from error
            much = f"{seconds:.1f} s" if str(error) == "time" else f"{MEMORY_BYTES >> 20} MiB"
            number = len(variables["messages"])
            messages = "1 message" if number == 1 else f"{number:,} messages"
            raise InvalidRequest(
                f"the chat template needs more than {much} for {messages}", param="messages"
            ) from error

    def _load(self, name: str, source: str) -> "_Loaded":
        """Parse a template, and see how it shows the simplest chats.

        Raises:
            ModelLoadError: the template does not parse, or breaks its limits there, as it then always would.
        """
        try:
            tree = environment().parse(source)
            environment().from_string(source)
        except Exception as error:  # jinja2 compiles to Python, which can refuse it too
            raise ModelLoadError(f"chat template {name}: {str(error)[:LONGEST_REASON]}") from error
        try:
            trial = _Trial(source, self.special_tokens, self._renderer)
            form = _content_form(trial)
        except TemplateExhausted as error:
            raise ModelLoadError(
                f"chat template {name}: it needs more {error} for one message than it may have",
                hint="--chat-template names another template",
            ) from error
        return _Loaded(source, tree, MessageForms(form, reasoning_names(tree), _traits(trial, form)))

    def _of_request(self, source: str) -> "_Loaded":
        """A template that comes with a request; parsing is linear, and its length is bounded."""
        if len(source) > MAX_SOURCE:
            raise InvalidRequest(f"chat_template must have at most {MAX_SOURCE} characters", param="chat_template")
        try:
            tree = environment().parse(source)
        except Exception as error:  # jinja2 raises RecursionError too
            reason = str(error)[:LONGEST_REASON]
            raise InvalidRequest(f"chat_template does not parse: {reason}", param="chat_template") from None
        trial = _Trial(source, self.special_tokens, self._renderer, REQUEST_PROBE_SECONDS)
        return _Loaded(source, tree, MessageForms("text", reasoning_names(tree), _traits(trial, "text")))

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> "_Loaded":
        if tools and "tool_use" in self._loaded:
            return self._loaded["tool_use"]
        loaded = self._loaded.get("default")
        if loaded is None and self._loaded:
            names = ", ".join(sorted(self._loaded))
            raise InvalidRequest(
                f"this model has no default chat template, only {names}; start the server with --chat-template NAME",
                param="messages",
            )
        if loaded is None:
            raise InvalidRequest("this model has no chat template; use completions", param="messages")
        return loaded


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for names that are not a caller's to set."""
    for name in kwargs:
        if not name.isidentifier() or name.startswith("_") or name in RESERVED or name in SPECIAL_TOKENS:
            raise InvalidRequest(f"chat_template_kwargs must not set {name!r}", param="chat_template_kwargs")


class _Loaded:
    """One template and the facts that follow from its text."""

    def __init__(self, source: str, tree: jinja2.nodes.Template, forms: MessageForms) -> None:
        self.source = source
        self.forms = forms
        self.reads_documents = any(
            isinstance(node, jinja2.nodes.Name) and node.name == "documents" for node in all_nodes(tree)
        )
        """The template mentions the variable; perhaps it shows them."""


class _Trial:
    """Renderings of small conversations by a template. Equal ones have equal results, however they are rendered."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], renderer: Renderer, seconds: float = QUICK_SECONDS
    ) -> None:
        self._source, self._special_tokens, self._renderer = source, special_tokens, renderer
        self._seconds = seconds

    def _key(self) -> tuple[object, ...]:
        return self._source, *sorted(self._special_tokens.items())

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Trial) and self._key() == other._key()

    def shown(self, content: Any) -> str:
        """The text of a chat with this content; empty where the template refuses it, which other chats may suit."""
        return self.shown_messages([{"role": "user", "content": content}])

    def shown_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """The same of a conversation."""
        variables = {**self._special_tokens, "messages": messages, "tools": tools, "add_generation_prompt": True}
        try:
            return self._renderer.render(self._source, variables, self._seconds)
        except TemplateRefused:
            return ""


@lru_cache(_KEPT_TRIALS)
def _content_form(trial: _Trial) -> ContentForm:
    """Remembered, since a trial starts a process: several engines of one program need it once."""
    return content_form(trial.shown)


@lru_cache(_KEPT_TRIALS)
def _traits(trial: _Trial, form: ContentForm) -> TemplateTraits:
    """Remembered like `_content_form`. A template that breaks its limits in a probe has the usual traits."""
    forms = MessageForms(form, ())
    try:
        tools = None if trial.shown(_MARK) else [*PROBE_TOOLS]  # some templates are for chats with tools only
        return probed(lambda messages: trial.shown_messages(forms.of(messages), tools))
    except TemplateExhausted:
        return TemplateTraits()


def _continue(text: str, content: str, tail: str | None) -> str:
    """Cut the rendered chat behind the last message's content.

    Args:
        tail: the text that the template writes behind any content of the last message; None where it does not show the
            content. The content itself is not looked for: short ones are in end marks too. Templates may trim it.
    """
    if not content.strip():
        raise InvalidRequest("continue_final_message needs text in the last message", param="messages")
    kept = text.removesuffix(tail or "")
    if tail is None or len(kept) + len(tail) != len(text) or not kept.rstrip().endswith(content.strip()):
        raise InvalidRequest("the chat template changes the last message; it cannot be continued", param="messages")
    return kept
