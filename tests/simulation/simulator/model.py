"""The oracle's language: what the right answer to a request is, computed without any engine.

The next token is a hash of all tokens before it (and of seed and fork, when sampled). Texts are found by decoding the
whole answer over and over, stop strings by searching it: slow, obvious, and written without a look at the engine's own.
"""

import codecs
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer as Backend, decoders, models, pre_tokenizers

from troupellm.actors.output.detokenizer import TextTables
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.params.sampling import SamplingParams
from troupellm.tests.support.scheduler.plain_beams import beams_of

EOS = 0
CHUNKS = ("</s>", *"abcdefghijklmnopqrstuvwxyzĠ", "ab", "the", "Ã", "©", "zz")
"""By token id, as byte-level tokenizers spell them: the space, and the halves of an accented letter, look odd."""
WIDTH = len(CHUNKS) + 2
"""Of the logits, which are padded."""
FIRST_TEXT_TOKEN = 1
_RESTS = 3

_PACKED = [struct.pack("<i", token) for token in range(1024)]


def extend(state: int, token: int) -> int:
    """The hash of a sequence that got one more token; 0 is the empty one."""
    return zlib.crc32(_PACKED[token], state)


def draw_key(temperature: float, seed: int, fork: int) -> int:
    """A key that separates the draws after equal tokens; greedy ones are all the same."""
    return 0 if temperature < 1e-5 else zlib.crc32(struct.pack("<Qi", seed & (2**64 - 1), fork), 1)


def token_after(state: int, key: int) -> int:
    return zlib.crc32(struct.pack("<II", state, key)) % WIDTH


class ToyGuide(msgspec.Struct, frozen=True):
    """A guide of the simulation: every token leaves the same rest, and after so many of them nothing can follow."""

    rest: int
    length: int

    @classmethod
    def read(cls, text: str) -> "ToyGuide":
        rest, length = text.split()
        return cls(int(rest), int(length))

    @property
    def text(self) -> str:
        return f"{self.rest} {self.length}"

    def token_after(self, state: int, key: int) -> int:
        allowed = range(FIRST_TEXT_TOKEN + self.rest, WIDTH, _RESTS)
        return allowed[token_after(state, key) % len(allowed)]


def ranking(state: int) -> list[tuple[float, int]]:
    """(log-probability, token) of everything that may follow, likeliest first: the greedy token, then as hashes go."""
    greedy = token_after(state, 0)
    values = [-1.0 - 6.0 * zlib.crc32(_PACKED[token], state ^ 0xFFFF) / 2**32 for token in range(WIDTH)]
    values[greedy] = -0.5
    single = struct.unpack(f"<{WIDTH}f", struct.pack(f"<{WIDTH}f", *values))
    return sorted(zip(single, range(WIDTH), strict=True), reverse=True)


def start_of(digest: str) -> int:
    """The hash of no tokens at all, with an adapter; 0 is the model itself."""
    return zlib.crc32(digest.encode())


def state_of(tokens: Sequence[int], start: int = 0) -> int:
    state = start
    for token in tokens:
        state = extend(state, token)
    return state


class Language(msgspec.Struct, frozen=True):
    """A kind of model as the simulation sees it."""

    tokenizer: Tokenizer
    tables: TextTables
    width: int
    eos: frozenset[int]
    continuation: Callable[[Sequence[int], SamplingParams, int, int, int], Sequence[int]]
    """(prompt, parameters, fork, how many, `start_of` its adapter) -> the tokens that follow, ends ignored."""


def hashed_tokens(prompt: Sequence[int], params: SamplingParams, fork: int, count: int, start: int) -> Sequence[int]:
    state, key = state_of(prompt, start), draw_key(params.temperature, params.seed or 0, fork)
    follow = token_after if params.guide is None else ToyGuide.read(params.guide.source).token_after
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(follow(state, key))
        state = extend(state, tokens[-1])
    return tokens


@cache
def oracle_language() -> Language:
    backend = Backend(models.BPE(vocab={piece: number for number, piece in enumerate(CHUNKS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(CHUNKS[EOS], special=True)])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        (folder / "config.json").write_text('{"eos_token_id": 0}')
        tokenizer = Tokenizer.load(folder)
    return Language(tokenizer, TextTables(tokenizer), WIDTH, frozenset({EOS}), hashed_tokens)


@cache
def chat_template() -> ChatTemplate:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>", "chat_template": "{{ messages }}"}')
        return ChatTemplate.load(folder, None)


class Answer(msgspec.Struct, frozen=True):
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_reason: int | str | None = None


def right_answer(
    language: Language, prompt: Sequence[int], params: SamplingParams, fork: int, max_tokens: int, start: int = 0
) -> Answer:
    """The answer of a request's sequence without faults."""
    tokens = language.continuation(prompt, params, fork, max_tokens, start)
    ends = frozenset() if params.ignore_eos else language.eos
    stops = frozenset(params.stop_token_ids or ())
    complete = None if params.guide is None else ToyGuide.read(params.guide.source).length
    for count, token in enumerate(tokens, 1):
        met = token in (ends | stops) and count >= params.min_tokens
        visible = count - 1 if met and not params.include_stop_str_in_output else count
        over = met or count in (max_tokens, complete)
        cut = _cut(language, tokens[:visible], params, final=over)
        if cut is not None:
            return Answer(tuple(tokens[:count]), cut[0], "stop", cut[1])
        if over:
            text = _decode(language, tokens[:visible], final=True)
            reason = token if met and token not in ends else None
            return Answer(tuple(tokens[:count]), text, "stop" if met or count == complete else "length", reason)
    raise AssertionError("an answer has an end")


def right_selection(
    language: Language, prompt: Sequence[int], params: SamplingParams, max_tokens: int, start: int = 0
) -> tuple[Answer, ...]:
    """The choices of a beam search or of best_of, best first."""
    if params.use_beam_search:
        ends = frozenset() if params.ignore_eos else language.eos
        found = beams_of(
            list(prompt),
            params.num_sequences,
            max_tokens,
            ends,
            params.length_penalty,
            early_stopping=params.early_stopping,
            candidates=lambda tokens: ranking(state_of(tokens, start)),
        )
        return tuple(_beam_answer(language, tokens, params, ends) for tokens in found[: params.n])
    forks = range(params.num_sequences)
    answers = [right_answer(language, prompt, params, fork, max_tokens, start) for fork in forks]
    return tuple(sorted(answers, key=lambda answer: -_likelihood(prompt, answer.token_ids, start))[: params.n])


def _beam_answer(language: Language, tokens: list[int], params: SamplingParams, ends: frozenset[int]) -> Answer:
    ended = tokens[-1] in ends
    shown = tokens[:-1] if ended and not params.include_stop_str_in_output else tokens
    return Answer(tuple(tokens), _decode(language, shown, final=True), "stop" if ended else "length")


def _likelihood(prompt: Sequence[int], tokens: Sequence[int], start: int) -> float:
    total, state = 0.0, state_of(prompt, start)
    for token in tokens:
        total += next(logprob for logprob, other in ranking(state) if other == token)
        state = extend(state, token)
    return total


def _cut(language: Language, tokens: Sequence[int], params: SamplingParams, *, final: bool) -> tuple[str, str] | None:
    """The text up to the first stop string, and that string. Text of the first `min_tokens` tokens does not count."""
    if not params.stop_strings or len(tokens) <= params.min_tokens:
        return None
    text = _decode(language, tokens, final=final)
    exempt = len(_decode(language, tokens[: params.min_tokens], final=False))
    for end in range(exempt + 1, len(text) + 1):
        found = [stop for stop in params.stop_strings if text[exempt:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return (text[:end] if params.include_stop_str_in_output else text[: end - len(longest)]), longest
    return None


def _decode(language: Language, tokens: Sequence[int], *, final: bool) -> str:
    """Text that is certain after these tokens; special tokens are left out."""
    special = language.tokenizer.special_token_ids
    raw = b"".join(language.tokenizer.token_bytes(token) for token in tokens if token not in special)
    return codecs.utf_8_decode(raw, "replace", final)[0]
