"""The holes of one call's template."""

import html
from collections.abc import Sequence

from troupellm.models.chat_parsers.compiled_syntax import Form, Plan
from troupellm.models.chat_parsers.element_tags import ElementsReader
from troupellm.models.chat_parsers.json_arguments import json_arguments
from troupellm.models.chat_parsers.json_calls import json_calls
from troupellm.models.chat_parsers.json_dump import json_dump
from troupellm.models.chat_parsers.json_text import json_whole
from troupellm.models.chat_parsers.offered_tools import OfferedTools
from troupellm.models.chat_parsers.pairs import PairsReader
from troupellm.models.chat_parsers.python_calls import python_calls
from troupellm.models.chat_parsers.syntax import CallSyntax, Element, Hole, Maybe, Word
from troupellm.models.chat_parsers.text_stream import NotACall, Reading, Source, literal, peek, spaces, word
from troupellm.models.chat_parsers.xml_calls import tagged_parameters
from troupellm.protocol.params.tools import NAME


class FormReader:
    """Remembers the values of the holes so far."""

    def __init__(self, source: Source, plan: Plan, offered_tools: OfferedTools, *, only_offered: bool) -> None:
        """
        Args:
            only_offered: a name that is not on offer is no call.
        """
        assert plan.syntax is not None, "forms come from a syntax"
        self._source = source
        self._plan = plan
        self._syntax: CallSyntax = plan.syntax
        self._offered_tools = offered_tools
        self._only_offered = only_offered
        self._name = ""
        self._id = ""

    def maybe(self, part: Maybe) -> Reading[None]:
        """Read optional elements."""
        for index, element in enumerate(part.parts):
            if isinstance(element, Word):
                yield from spaces(self._source)
                if not (yield from literal(self._source, element.text)):
                    return
            elif isinstance(element, Hole):
                yield from self.hole(element.name, part.parts, index)

    def hole(self, kind: str, parts: Sequence[Element], index: int) -> Reading[bool]:
        """Read the text of a hole; False if arguments have begun and are broken.

        Args:
            parts: of the template; the hole is the one at `index`.

        Raises:
            NotACall: something else comes.
        """
        source, offered_tools = self._source, self._offered_tools
        following = parts[index + 1] if index + 1 < len(parts) else None
        ending = following.text if isinstance(following, Word) else ""
        match kind:
            case "json" | "named":
                return (
                    yield from json_calls(
                        source,
                        self._syntax,
                        offered_tools,
                        self._plan.argument_ends,
                        only_offered=self._only_offered,
                        named=kind == "named",
                    )
                )
            case "python":
                return (yield from python_calls(source, offered_tools))
            case "lines":
                return (yield from python_calls(source, offered_tools, listed=False))
            case "name":
                yield from self._read_name(quoted=_behind_equals(parts, index))
            case "id":
                yield from self._read_id()
            case "call_id":
                self._id = yield from word(source)
                source.named = (self._name, self._id)
            case "arguments":
                return (yield from self._arguments())
            case "parameters":
                block = self._plan.block
                if block is not None and (yield from literal(source, block.lead)):
                    return (yield from self._block(block))
                return (
                    yield from tagged_parameters(
                        source, self._plan.parameters, offered_tools, self._name, self._id, ending
                    )
                )
            case "pairs":
                return (yield from PairsReader(source, offered_tools, self._syntax.quote).read(self._name))
            case "elements":
                return (yield from ElementsReader(source, offered_tools, self._syntax.prefix).read(self._name, ending))
            case _:
                yield from self._quoted_word(quoted=_behind_equals(parts, index))
        return True

    def _block(self, block: Form) -> Reading[bool]:
        """The rest of an object with all arguments, and of the marks around it."""
        for index, part in enumerate(block.rest):
            yield from spaces(self._source)
            if isinstance(part, Maybe):
                yield from self.maybe(part)
            elif isinstance(part, Hole):
                if not (yield from self.hole(part.name, block.rest, index)):
                    return False
            elif not (yield from literal(self._source, part.text)):
                if self._source.attempting:
                    raise NotACall
                return True
        return True

    def _read_name(self, *, quoted: bool) -> Reading[None]:
        name = yield from self._quoted_word(quoted=quoted)
        if self._syntax.entities:
            name = html.unescape(name)
        if self._only_offered and not self._offered_tools.has(name):
            raise NotACall
        self._name = name
        if NAME.fullmatch(name) and (
            self._source.pos < len(self._source.text) or self._offered_tools.has_no_longer(name)
        ):
            self._source.named = (name, self._id)

    def _quoted_word(self, *, quoted: bool) -> Reading[str]:
        """A word; quotes around it count where they may come."""
        source = self._source
        quote = (yield from peek(source)) if quoted else ""
        if quote not in ("'", '"'):
            return (yield from word(source))
        source.take(1)
        found = yield from word(source)
        if not (yield from literal(source, quote)):
            raise NotACall
        return found

    def _read_id(self) -> Reading[None]:
        call_id = yield from word(self._source)
        self._name = self._offered_tools.numbered(call_id)
        self._id = call_id if self._name == call_id.removeprefix("functions.").rpartition(":")[0] else ""
        if self._source.pos < len(self._source.text):
            self._source.named = (self._name, self._id)

    def _arguments(self) -> Reading[bool]:
        source = self._source
        if (yield from peek(source)) != "{":
            raise NotACall
        if not self._name:
            value = yield from json_whole(source)
            name = self._offered_tools.only_fitting(value) if isinstance(value, dict) else ""
            if not name:
                raise NotACall
            source.call(name)
            source.arguments(json_dump(value))
            source.end_call()
            return True
        source.call(self._name, self._id)
        whole = yield from json_arguments(source, source.arguments, self._plan.argument_ends)
        if whole:
            source.end_call()
        return whole


def _behind_equals(parts: Sequence[Element], index: int) -> bool:
    before = parts[index - 1] if index else None
    return isinstance(before, Word) and before.text.endswith("=")
