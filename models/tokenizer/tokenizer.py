"""The tokenizer: text to token ids and back, on the `tokenizers` library.

Beside encode and decode it says how its decoder joins tokens, from which the detokenizer builds its tables. In the
byte-level form, a text is the UTF-8 of all token bytes in a row. In the byte-fallback form (SentencePiece), every token
is text except 256 byte tokens. Any other form is left to the library.
"""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from tokenizers import Encoding, Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from troupellm.models.config.model_documents import read_json
from troupellm.models.config.text_section import text_values
from troupellm.models.hub.gguf_header import is_gguf
from troupellm.models.processes.rust_panics import no_panics
from troupellm.models.tokenizer.added_tokens import AddedToken, check_added
from troupellm.models.tokenizer.gguf_published_tokenizer import published_tokenizer
from troupellm.models.tokenizer.gguf_tokenizer import gguf_tokenizer
from troupellm.models.tokenizer.tokenizer_files import Loaded, load_backend
from troupellm.protocol.errors import InvalidRequest, ModelLoadError

DecoderForm = Literal["byte_level", "byte_fallback", "other"]

MOST_TOKENS = 2**24
SHORT_LETTERS = 1_000
"""Characters of a text that is encoded under the interpreter's lock: under a millisecond."""
LARGE = 2**18
"""Items of a list that take some 8 ms to make."""
PAUSE_SECONDS = 0.005
_LIBRARY = "tokenizers"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TooManyTokens(Exception):
    """A text has more tokens than its caller can use."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.num_tokens = num_tokens


class _Definition(msgspec.Struct):
    """The only parts of tokenizer.json that are read here."""

    decoder: dict[str, Any] | None = None
    added_tokens: tuple[AddedToken, ...] = ()


class Tokenizer:
    """Immutable and thread-safe.

    Attributes:
        size: one more than the highest token id.
        base_size: number of tokens without those that were added to the vocabulary.
        form: how the decoder joins tokens.
        special_token_ids: left out of a text by `skip_special_tokens`.
        byte_token_ids: tokens that stand for one raw byte; only in the byte fallback form.
        longest_token: bytes of the longest token.
    """

    def __init__(
        self,
        backend: Backend,
        definition: bytes,
        eos_token_ids: frozenset[int],
        bos: str | None,
        *,
        bos_once: bool = False,
    ) -> None:
        """
        Args:
            bos_once: whether a text that begins with BOS gets no second one.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        read = msgspec.json.decode(definition, type=_Definition)
        self.form: DecoderForm = _decoder_form(read.decoder)
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.size: int = max(vocabulary.values(), default=-1) + 1
        if self.size > MOST_TOKENS:
            raise ModelLoadError(f"tokenizer.json: a token has the id {self.size - 1}, beyond {MOST_TOKENS}")
        self.base_size: int = backend.get_vocab_size(with_added_tokens=False)
        check_added(read.added_tokens, vocabulary)
        self.eos_token_ids = eos_token_ids
        self.bos_token_id: int | None = None if bos is None else vocabulary.get(bos)
        self._given_bos = bos if bos_once and bos is not None and self._adds(self.bos_token_id) else ""
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.added_tokens: dict[str, int] = {
            token.content: token_id for token_id, token in backend.get_added_tokens_decoder().items()
        }
        """Special or not, by text."""
        self.byte_token_ids: frozenset[int] = frozenset()
        if self.form == "byte_fallback":
            self.byte_token_ids = frozenset(i for text, i in vocabulary.items() if _BYTE_TOKEN.fullmatch(text))
        self._bytes = self._token_table(vocabulary)
        self.longest_token: int = max(map(len, self._bytes), default=0)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `tokenizer.json` and the files beside it, an older format, or a GGUF file.

        Args:
            folder: of the model, or a GGUF file.

        Raises:
            ModelLoadError: no tokenizer, or one that cannot be read.
        """
        config = read_json(folder / "tokenizer_config.json")
        loaded = _gguf(folder, config) if is_gguf(folder) else load_backend(folder, config)
        bos = token_text(loaded.settings.get("bos_token"))
        ends = _eos_token_ids(folder, loaded)
        return cls(loaded.backend, loaded.definition, ends, bos, bos_once=is_gguf(folder))

    def vocabulary(self) -> dict[str, int]:
        """Every token's id by its form within the tokenizer."""
        found: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return found

    def encode(self, text: str, *, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """The token ids of a text. A text of more than `SHORT_LETTERS` is encoded without the interpreter's lock.

        Args:
            most: token ids that the caller can use; None is any number. Making the list holds the lock.

        Raises:
            TooManyTokens: the text has more than `most`; no list was made.
        """
        encoding = self._encoding(text, add_special_tokens=add_special_tokens)
        if most is not None and len(encoding) > most:
            raise TooManyTokens(len(encoding))
        ids: list[int] = encoding.ids
        let_others_run(len(ids))  # before the encoding is freed, which takes as long again
        return ids

    def count(self, text: str, *, add_special_tokens: bool) -> int:
        """The number of tokens of a text, without a list of them."""
        return len(self._encoding(text, add_special_tokens=add_special_tokens))

    def _encoding(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """`Tokenizer.encode` holds the interpreter's lock and also computes offsets; batches do neither.

        Short texts keep to it because the first batch starts the library's own threads, which stay, and a program that
        forks later gets a warning about them.
        """
        if add_special_tokens:
            text = text.removeprefix(self._given_bos)
        with no_panics(_LIBRARY):
            if len(text) <= SHORT_LETTERS:
                return self._backend.encode(text, add_special_tokens=add_special_tokens)
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def _adds(self, token_id: int | None) -> bool:
        """True if every text begins with this token."""
        with no_panics(_LIBRARY):
            return token_id is not None and self._backend.encode("a", add_special_tokens=True).ids[:1] == [token_id]

    def encode_pair(
        self, first: str, second: str, *, most: int | None, side: Literal["left", "right"]
    ) -> tuple[list[int], int, bool]:
        """Encode two texts with the special tokens around them, cut to at most `most` tokens; special tokens stay.

        The longer text is cut first, as the library's own longest-first truncation does it.

        Returns:
            token ids, the position of the first one that belongs to the second text (0 where they do not differ), and
            whether a text was cut.

        Raises:
            InvalidRequest: not even the special tokens fit.
        """
        parts = [self._encoding(text, add_special_tokens=False) for text in (first, second)]
        cut = False
        if most is not None:
            special = self._backend.num_special_tokens_to_add(True)
            if most <= special:
                raise InvalidRequest(
                    f"truncate_prompt_tokens must be at least {special + 1}: {special} tokens are special ones",
                    param="truncate_prompt_tokens",
                )
            lengths = _shares(len(parts[0]), len(parts[1]), most - special)
            for part, length in zip(parts, lengths, strict=True):
                cut = cut or length < len(part)
                part.truncate(length, direction=side)
        with no_panics(_LIBRARY):
            whole = self._backend.post_process(parts[0], parts[1], True)
        return whole.ids, whole.type_ids.index(1) if 1 in whole.type_ids else 0, cut

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the tokens; invalid bytes show as U+FFFD, ids beyond the vocabulary as nothing."""
        ids = list(token_ids)
        with no_panics(_LIBRARY):
            if len(ids) <= SHORT_LETTERS:
                text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
            else:  # without the interpreter's lock: see `_encoding`
                (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text, special or not; empty beyond the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < self.size else b""

    def definition(self) -> str:
        """The tokenizer.json from which an equal tokenizer can be built."""
        text: str = self._backend.to_str()
        return text

    def decode_stream(self, *, skip_special_tokens: bool) -> "LibraryStream":
        return LibraryStream(self._backend, skip_special_tokens)

    def _token_table(self, vocabulary: dict[str, int]) -> list[bytes]:
        table = [b""] * self.size
        for text, token_id in vocabulary.items():
            if self.form == "byte_level":
                table[token_id] = _byte_level_bytes(text)
            elif self.form == "byte_fallback":
                match = _BYTE_TOKEN.fullmatch(text)
                table[token_id] = bytes.fromhex(match[1]) if match else text.replace("\u2581", " ").encode()
            else:
                table[token_id] = self.decode((token_id,), skip_special_tokens=False).encode()
        return table


class LibraryStream:
    """The library's own incremental decoder for one sequence."""

    def __init__(self, backend: Backend, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)

    def step(self, token_id: int) -> str:
        """The text that becomes final with this token."""
        try:
            return self._step(token_id)
        except Exception:  # the library gives up on some invalid byte sequences and raises bare Exception
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            return self._step(token_id)

    def _step(self, token_id: int) -> str:
        with no_panics(_LIBRARY):
            return self._stream.step(self._backend, token_id) or ""


def let_others_run(num_items: int) -> None:
    """Sleep for a moment on a thread that works on so many items.

    An event loop gives the lock up in each of its rounds. Without the pause this thread takes it again at once, and two
    long operations in a row hold the loop up like one.
    """
    if num_items > LARGE:
        time.sleep(PAUSE_SECONDS)


def _shares(first: int, second: int, most: int) -> tuple[int, int]:
    """The number of tokens kept of each of two texts."""
    shorter, longer = sorted((first, second))
    longer = shorter if shorter > most else min(longer, max(shorter, most - shorter))
    if shorter + longer > most:
        shorter, longer = most // 2, most - most // 2
    return (shorter, longer) if first <= second else (longer, shorter)


def _gguf(path: Path, config: dict[str, Any]) -> Loaded:
    """A GGUF file's tokenizer; special tokens, ends and templates are the file's in any case."""
    beside = published_tokenizer(path)
    if beside is not None:
        return beside._replace(settings=config)
    backend = gguf_tokenizer(path)
    return Loaded(backend, backend.to_str().encode(), config)


def _decoder_form(decoder: dict[str, Any] | None) -> DecoderForm:
    """The form of a tokenizer.json decoder, if it is one of the two standard forms."""
    steps = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level"
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"]:
        replace, strips = steps[0], steps[3:]
        plain = replace.get("pattern") == {"String": "\u2581"} and replace.get("content") == " "
        leading = all(s.get("type") == "Strip" and s.get("content") == " " and s.get("stop") == 0 for s in strips)
        if plain and leading:
            return "byte_fallback"
    return "other"


def _byte_alphabet() -> dict[str, int]:
    """The printable characters that stand for the 256 bytes in a byte level vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return {chr(byte if byte in printable else next(spare)): byte for byte in range(256)}


_ALPHABET = _byte_alphabet()


def _byte_level_bytes(text: str) -> bytes:
    """Bytes of a token; one with a character outside the alphabet (an added token) stands for itself."""
    try:
        return bytes([_ALPHABET[character] for character in text])
    except KeyError:
        return text.encode()


def token_text(entry: Any) -> str | None:
    """A special token as tokenizer_config.json writes it: a string, or an object with `content`."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None


def known_ends(folder: Path) -> tuple[str, list[int]]:
    """The end tokens of the generation config, or else of the model config, and the name of the file.

    Raises:
        ModelLoadError: an entry is no token id.
    """
    for name in ("generation_config.json", "config.json"):
        settings = read_json(folder / name)
        levels = reversed(text_values(settings))  # the file's own counts first
        given = next((level["eos_token_id"] for level in levels if level.get("eos_token_id") is not None), None)
        if given is None:
            continue
        ids = given if isinstance(given, list) else [given]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ModelLoadError(f"{name}: eos_token_id must be a token id or a list of them, got {str(given)[:80]}")
        return name, ids
    return "config.json", []


def _eos_token_ids(folder: Path, loaded: Loaded) -> frozenset[int]:
    """End tokens named by the model's files, and the tokenizer's own. A model that names none may have none.

    Raises:
        ModelLoadError: the tokenizer's own is no token of it, and no other is told: no text would ever end.
    """
    found = set(known_ends(folder)[1])
    text = token_text(loaded.settings.get("eos_token"))
    own = None if text is None or text in loaded.invented else loaded.backend.token_to_id(text)
    if own is not None:
        found.add(own)
    elif text and not found:
        raise ModelLoadError(f"tokenizer_config.json: eos_token {text[:80]!r} is no token of the tokenizer")
    return frozenset(found)
