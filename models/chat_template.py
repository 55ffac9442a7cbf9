"""Chat templates: messages to the prompt text that the model was trained on.

A template is part of a downloaded model and so not trusted: it runs in jinja2's immutable sandbox and sees only what it
is given. What goes wrong while it renders is the request's fault, since the template was parsed when it was loaded.
"""

import datetime
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from troupellm.models.call_arguments import with_text_arguments
from troupellm.models.model_documents import read_json
from troupellm.models.model_folder import check_file
from troupellm.models.template_meter import TemplateExhausted, TemplateLimit, used
from troupellm.models.template_sandbox import Sandbox
from troupellm.models.template_sizes import MAX_WIDTH, made
from troupellm.protocol.errors import InvalidRequest, ModelLoadError

RESERVED = frozenset(
    {
        "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
        "conversation", "tokenize", "return_tensors", "return_dict",
    }
)  # fmt: skip
"""Names that a caller's keyword arguments may not set, beside the special tokens."""
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
HEAVY_COST = 5_000_000
"""Some milliseconds."""
HEAVY_SECONDS = 0.01
"""Of the thread's CPU time."""
BRIEF_SECONDS = 0.03
"""When a rendering on an event loop is given up, whatever it was charged."""
_PIECE_COST = 500
"""Of each piece of JSON that is laid out by Python."""
_LONGEST_REASON = 300
_MARK = "the-last-message"
"""Stands in for what an answer goes on from."""
MAX_SOURCE = 65_536
"""Characters of a template that comes with a request."""
_LOOKS_LIKE_TEXT = ("{{", "{%", "{#", "\n")


class HeavyTemplate(Exception):
    """A template wants more than an event loop has to give; render it in a thread."""


class _Haste(threading.local):
    """Whether this thread has no time to lose."""

    brief = False


class ChatTemplate:
    """Thread-safe. Without a template every chat is refused, with a message that says so."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            templates: text by name; "default" is used unless tools are given and there is a "tool_use".

        Raises:
            ModelLoadError: a template does not parse.
        """
        self.heavy = False
        """It once took longer, over a short chat, than an event loop may be held up."""
        self._haste = _Haste()
        environment = self._environment = _environment()
        self.sources = dict(templates)
        self.special_tokens = dict(special_tokens)
        self._compiled: dict[str, _Compiled] = {}
        for name, text in templates.items():
            try:
                self._compiled[name] = _Compiled.of(environment, text)
            except Exception as error:  # jinja2 compiles to Python, which can refuse it too
                raise ModelLoadError(f"chat template {name}: {str(error)[:_LONGEST_REASON]}") from error
            self._try(name)

    @classmethod
    def load(cls, folder: Path, override: str | None) -> "ChatTemplate":
        """Read the model's template, or `override`: a file, or the text itself.

        Raises:
            ModelLoadError: the file is missing, a link out of the folder, or a template that does not parse.
        """
        config = read_json(folder / "tokenizer_config.json")
        tokens = {name: text for name in _SPECIAL_TOKENS if (text := _content(config.get(name))) is not None}
        if override is not None:
            return cls({"default": _read_override(override)}, tokens)
        templates = _named(config.get("chat_template"))
        file = folder / "chat_template.jinja"
        check_file(file)
        if file.is_file():
            templates["default"] = _read(file)
        for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            check_file(extra, folder)
            templates[extra.stem] = _read(extra)
        return cls(templates, tokens)

    @property
    def available(self) -> bool:
        """Whether the model came with a template, or was given one."""
        return bool(self._compiled)

    @contextmanager
    def brief(self) -> Iterator[None]:
        """For renderings on an event loop: `render` gives up soon. Once it did, the template is heavy.

        Raises:
            HeavyTemplate: it gave up.
        """
        before, self._haste.brief = self._haste.brief, True
        try:
            yield
        finally:
            self._haste.brief = before

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        source: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text.

        Args:
            continue_final_message: end the prompt with the last message's content, left open; excludes
                add_generation_prompt.
            documents: for templates that ground answers in them; the others refuse them.
            source: text of a template to use instead of the model's own.
            kwargs: further variables for the template.

        Raises:
            InvalidRequest: no template, messages that the template refuses, or a reserved keyword.
            HeavyTemplate: it is to be brief, and is not.
        """
        compiled = self._choose(tools) if source is None else self._compile(source)
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        if documents and not compiled.reads_documents:
            raise InvalidRequest(
                "documents: the chat template does not read them",
                param="documents",
                code="unsupported_parameter",
            )
        check_template_kwargs(kwargs)
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        variables = {
            **self.special_tokens,
            **kwargs,
            "messages": messages,
            "tools": tools or None,
            "documents": documents or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._rendered(compiled.template, variables)
            if continue_final_message:
                marked = [*messages[:-1], {**messages[-1], "content": _MARK}]
                found = self._rendered(compiled.template, variables | {"messages": marked}).rpartition(_MARK)
        except Exception as error:  # template code can raise anything over somebody's messages
            if self._haste.brief and isinstance(error, TemplateExhausted):
                raise HeavyTemplate from error
            reason = str(error)[:_LONGEST_REASON]
            raise InvalidRequest(f"the chat template refuses these messages: {reason}", param="messages") from error
        return _continue(text, messages, found[2] if found[1] else None) if continue_final_message else text

    def _rendered(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        try:
            return self._bounded(template, variables)
        except TypeError:  # it adds the arguments of a past call to a text
            messages = with_text_arguments(variables["messages"])
            if messages is None:
                raise
        return self._bounded(template, variables | {"messages": messages})

    def _bounded(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """What a long chat costs in a thread says nothing about short ones, so only brief renderings make it heavy."""
        if not self._haste.brief:
            return self._environment.bounded(template, variables)
        try:
            return self._environment.bounded(template, variables, HEAVY_COST, BRIEF_SECONDS)
        finally:
            if used.cost > HEAVY_COST or used.seconds > HEAVY_SECONDS:
                self.heavy = True

    def _try(self, name: str) -> None:
        """One rendering of the simplest chat: a template that breaks the limits there breaks them always.

        Raises:
            ModelLoadError: it does. What else it does not like, messages may still have.
        """
        variables = {"messages": [{"role": "user", "content": "hi"}], "tools": None, "add_generation_prompt": True}
        try:
            self._environment.bounded(self._compiled[name].template, self.special_tokens | variables)
        except TemplateLimit as error:
            raise ModelLoadError(f"chat template {name}: {error}") from error
        except Exception:  # template code can raise anything
            pass
        self.heavy = self.heavy or used.cost > HEAVY_COST

    def _compile(self, source: str) -> "_Compiled":
        """A request's own template; parsing is linear, and its length is bounded."""
        if len(source) > MAX_SOURCE:
            raise InvalidRequest(f"chat_template must have at most {MAX_SOURCE} characters", param="chat_template")
        try:
            return _Compiled.of(self._environment, source)
        except Exception as error:  # jinja2 compiles to Python, which can refuse it too
            reason = str(error)[:_LONGEST_REASON]
            raise InvalidRequest(f"chat_template does not parse: {reason}", param="chat_template") from None

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> "_Compiled":
        if tools and "tool_use" in self._compiled:
            return self._compiled["tool_use"]
        compiled = self._compiled.get("default")
        if compiled is None:
            raise InvalidRequest("this model has no chat template; use completions", param="messages")
        return compiled


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for names that are not a caller's to set."""
    for name in kwargs:
        if not name.isidentifier() or name.startswith("_") or name in RESERVED or name in _SPECIAL_TOKENS:
            raise InvalidRequest(f"chat_template_kwargs must not set {name!r}", param="chat_template_kwargs")


class _Compiled(NamedTuple):
    template: jinja2.Template
    reads_documents: bool
    """It mentions the variable; whether it shows them is up to it."""

    @classmethod
    def of(cls, environment: Sandbox, source: str) -> "_Compiled":
        tree = environment.parse(source)
        mentions = any(name.name == "documents" for name in tree.find_all(jinja2.nodes.Name))
        return cls(environment.from_string(tree), mentions)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> Sandbox:
    environment = Sandbox([jinja2.ext.loopcontrols, _Generation])
    environment.add_filter("tojson", _tojson)
    environment.add_function("raise_exception", _raise_exception)
    environment.add_function("strftime_now", _strftime_now)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes for HTML, which no model was trained on."""
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > MAX_WIDTH:
        raise TemplateLimit(f"the template indents by more than {MAX_WIDTH}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None and separators is None:
        return encoder.encode(value)
    pieces, length = [], 0
    for piece in encoder.iterencode(value):  # how deep it is decides how wide it gets
        length += len(piece)
        made(length)
        used.charge(_PIECE_COST + len(piece))
        pieces.append(piece)
    return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > _LONGEST_REASON or re.search(r"\d{3,}", form):
        raise jinja2.TemplateError("strftime_now takes a short form")
    return datetime.datetime.now().strftime(form)


def _continue(text: str, messages: Sequence[Mapping[str, Any]], tail: str | None) -> str:
    """Cut the rendered chat behind the last message's content.

    Args:
        tail: what the template writes behind whatever stands in the last message; None where it shows none of that. The
            content itself is not looked for: short ones are in end marks too. Templates may trim it.
    """
    content = messages[-1].get("content")
    if not isinstance(content, str) or not content.strip():
        raise InvalidRequest("continue_final_message needs text in the last message", param="messages")
    kept = text.removesuffix(tail or "")
    if tail is None or len(kept) + len(tail) != len(text) or not kept.rstrip().endswith(content.strip()):
        raise InvalidRequest("the chat template changes the last message; it cannot be continued", param="messages")
    return kept


def _content(entry: Any) -> str | None:
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def _named(entry: Any) -> dict[str, str]:
    """`chat_template` of tokenizer_config.json: a text, or a list of named texts."""
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        pairs = [(item.get("name"), item.get("template")) for item in entry if isinstance(item, dict)]
        named = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
        if len(named) == len(entry):
            return named
    raise ModelLoadError("tokenizer_config.json: chat_template must be a text or a list of named templates")


def _read_override(override: str) -> str:
    if any(mark in override for mark in _LOOKS_LIKE_TEXT):
        return override
    path = Path(override)
    if not path.is_file():
        raise ModelLoadError("chat_template names no file and is no template text")
    return _read(path)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"chat template {path.name} cannot be read") from error
