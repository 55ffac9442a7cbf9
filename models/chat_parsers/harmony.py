"""Channels: every message has a header that names its kind: thought, tool call or answer."""

import re
from typing import Final

from troupellm.models.chat_parsers.json_arguments import ArgumentEnds, json_arguments
from troupellm.models.chat_parsers.offered_tools import OfferedTools
from troupellm.models.chat_parsers.syntax import Channels
from troupellm.models.chat_parsers.text_stream import MOST_CALLS, Reading, Source, comes, peek, spaces
from troupellm.models.chat_parsers.until_marker import Marks, raw_until, text_until
from troupellm.protocol.params.tools import NAME

_LONGEST_HEADER: Final = 512
_RECIPIENT: Final = re.compile(r"\bto=(\S+)")


class ChannelMarks:
    """The marks of a description."""

    def __init__(self, channels: Channels) -> None:
        self.channels = channels
        self.all = (channels.start, channels.channel, channels.message, channels.constrain, *channels.ends)
        self.body = Marks([channels.start, channels.channel, *channels.ends])
        """Marks that end a message."""
        self.header = Marks(self.all)
        self.argument_ends = ArgumentEnds(self.body, self.body)


def opened_channel(ending: str, channels: Channels) -> str:
    """The channel of the message whose header a prompt ends with; empty where there is none."""
    if not ending.endswith(channels.message):
        return ""
    return _address(ending[: -len(channels.message)].rpartition(channels.start)[2], channels)[0]


def read_channels(
    source: Source, marks: ChannelMarks, offered_tools: OfferedTools, *, with_calls: bool, region: str = ""
) -> Reading[None]:
    """Read messages until the end of the text.

    Args:
        with_calls: tools are on offer; otherwise a message to a tool is content.
        region: the prompt ends inside a message of this channel; empty: before the first header.
    """
    channels = marks.channels
    mark = channels.start  # which the prompt ends with
    if region:
        mark = yield from _body(source, marks, offered_tools, region, "", with_calls=with_calls)
    elif not (yield from _header_comes(source, channels)):
        mark = yield from _body(source, marks, offered_tools, "final", "", with_calls=with_calls)
    while mark:
        source.region = "header"
        if mark in channels.ends:
            found = yield from text_until(source, marks.header, source.content)
            mark = "" if found is None else found.mark
            continue
        header: list[str] = []
        mark = yield from _header(source, marks, mark, header)
        if mark == channels.message:
            channel, recipient = _address("".join(header), channels)
            mark = yield from _body(source, marks, offered_tools, channel, recipient, with_calls=with_calls)


def _header_comes(source: Source, channels: Channels) -> Reading[bool]:
    """True if the text begins as a message does; a model whose prompt has no channels answers without a header."""
    source.attempt()
    yield from spaces(source)
    for beginning in (channels.channel, channels.start, channels.message, "to="):
        if (yield from comes(source, beginning)):
            source.commit()
            return True
    source.content(source.give_up())
    return False


def _header(source: Source, marks: ChannelMarks, mark: str, header: list[str]) -> Reading[str]:
    """Read from `mark` to the mark that ends the header."""
    channels = marks.channels
    while mark in (channels.start, channels.channel, channels.constrain):
        parts: list[str] = []
        header.append(mark)
        mark = yield from raw_until(source, marks.header, parts.append)
        header.append("".join(parts)[:_LONGEST_HEADER])
    return mark


def _address(header: str, channels: Channels) -> tuple[str, str]:
    """Channel and recipient of a message."""
    _, _, after = header.rpartition(channels.channel)
    words = after.split()
    channel = words[0] if words else "final"
    found = _RECIPIENT.search(header.replace(channels.channel, " ").replace(channels.constrain, " "))
    return channel, found[1] if found else ""


def _body(
    source: Source, marks: ChannelMarks, offered_tools: OfferedTools, channel: str, recipient: str, *, with_calls: bool
) -> Reading[str]:
    """A message's text; gives the mark that ends it, empty at the end of the text."""
    channels = marks.channels
    name = _function(recipient, channels, offered_tools) if with_calls else ""
    if name and source.calls < MOST_CALLS:
        source.region = "call"
        source.call(name)
        return (yield from _arguments(source, marks))
    thought = channel in channels.reasoning
    source.region = "reasoning" if thought else "content"
    found = yield from text_until(source, marks.body, source.reasoning if thought else source.content)
    return "" if found is None else found.mark


def _function(recipient: str, channels: Channels, offered_tools: OfferedTools) -> str:
    """The function that a message is addressed to; empty where it is none."""
    if not recipient:
        return ""
    found = offered_tools.recipient(recipient)
    name = recipient.removeprefix(channels.recipient)
    if found or not recipient.startswith(channels.recipient) or not NAME.fullmatch(name):
        return found
    return name


def _arguments(source: Source, marks: ChannelMarks) -> Reading[str]:
    """Read a call's message: an object, nothing, or any other text. Return the mark that ends it."""
    rest: list[str] = []
    yield from spaces(source)
    first = yield from peek(source)
    whole = first == "{" and (yield from json_arguments(source, source.arguments, marks.argument_ends))

    def show(text: str) -> None:
        rest.append(text)
        source.arguments(text)

    found = yield from text_until(source, marks.body, show)
    if first != "{" and not any(rest) and (found is not None or not source.cut):
        source.arguments("{}")
        whole = True
    if whole:
        source.end_call()
    return "" if found is None else found.mark
