"""The tokenizer that a GGUF file describes, built from the `tokenizers` library's parts.

Two kinds: byte-level BPE ("gpt2"), whose way of cutting text into words goes by a name, and SentencePiece's BPE
("llama"), whose merges follow from the scores. Both come out as the model's own tokenizer.json has them.
"""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from troupellm.models.gguf.header import Header, read_header
from troupellm.models.gguf.special_tokens import CONTROL, USER_DEFINED, special_id, vocabulary
from troupellm.models.hf_config import ConfigReader
from troupellm.models.panics import no_panics
from troupellm.protocol.errors import ModelLoadError

UNKNOWN = 2
SPACE = "\u2581"
LONGEST_PIECE = 256
"""Characters of a token that merges are worked out for: their number grows with the length."""


class Words(NamedTuple):
    """How a byte-level vocabulary cuts text into words."""

    pattern: str | None = None
    """None is GPT-2's own."""
    whole_first: bool = False
    """A word that is a token is taken as it is, whatever the merges say."""
    compose: bool = False
    """Text is brought into Unicode's form NFC first."""
    single_digits: bool = False


_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LLAMA3 = Words(_LETTERS + r"|\p{N}{1,3}" + _TAIL, whole_first=True)
_QWEN2 = Words(_LETTERS + r"|\p{N}" + _TAIL, compose=True)
WORDS = {
    "default": Words(), "gpt-2": Words(), "smollm": Words(single_digits=True),
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
    "tekken": Words(_CASED % ("", "", r"\p{N}"), whole_first=True),
    "gpt-4o": Words(_CASED % (_ENDINGS, _ENDINGS, r"\p{N}{1,3}")),
}  # fmt: skip
"""By `tokenizer.ggml.pre`; the patterns are those of the models' own tokenizers."""


def gguf_tokenizer(path: Path) -> Tokenizer:
    """
    Raises:
        ModelLoadError: no tokenizer, one of a kind that is not supported, or one that contradicts itself.
    """
    header = read_header(path)
    reader = ConfigReader(header.metadata, file=header.name)
    kind = reader.choice("tokenizer.ggml.model", ("gpt2", "llama"))
    tokens, kinds = vocabulary(header)
    if len(set(tokens)) != len(tokens):
        raise ModelLoadError(f"{header.name}: tokenizer.ggml.tokens has a token twice")
    try:
        with no_panics("tokenizers"):
            backend = _byte_level(reader, tokens) if kind == "gpt2" else _sentence_piece(reader, header, tokens)
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{header.name}: the tokenizer cannot be built: {error}") from error
    for special, wanted in ((False, (USER_DEFINED,)), (True, (CONTROL, UNKNOWN))):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, found in zip(tokens, kinds, strict=True)
            if found in wanted and token
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    _add_ends(backend, reader, header, tokens, starts=kind == "llama" or _words(reader).whole_first)
    return backend


def _words(reader: ConfigReader) -> Words:
    return WORDS[reader.choice("tokenizer.ggml.pre", tuple(WORDS), "default")]


def _byte_level(reader: ConfigReader, tokens: Sequence[str]) -> Tokenizer:
    merges = reader.values.get("tokenizer.ggml.merges")
    written = isinstance(merges, list) and all(isinstance(merge, str) for merge in merges[:1])
    pairs = [tuple(merge.split(" ")) for merge in merges] if written and merges else []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise reader.refuse("tokenizer.ggml.merges", "must be pairs of tokens")
    words = _words(reader)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=words.whole_first))
    if words.compose:
        backend.normalizer = normalizers.NFC()
    cuts: list[pre_tokenizers.PreTokenizer] = []
    if words.single_digits:
        cuts.append(pre_tokenizers.Digits(individual_digits=True))
    if words.pattern is not None:
        cuts.append(pre_tokenizers.Split(Regex(words.pattern), behavior="isolated"))
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words.pattern is None))
    backend.pre_tokenizer = cuts[0] if len(cuts) == 1 else pre_tokenizers.Sequence(cuts)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(reader: ConfigReader, header: Header, tokens: Sequence[str]) -> Tokenizer:
    scores = reader.values.get("tokenizer.ggml.scores", array("f"))
    if not isinstance(scores, array):
        raise reader.refuse("tokenizer.ggml.scores", "must be an array of numbers")
    if len(scores) != len(tokens):
        raise ModelLoadError(f"{header.name}: tokenizer.ggml.scores is for {len(scores)} of {len(tokens)} tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = special_id(header, "unknown_token_id")
    backend = Tokenizer(
        models.BPE(
            vocabulary,
            merges_of(vocabulary, scores),
            unk_token=tokens[unknown if unknown is not None else 0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    leading = reader.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces] if leading else [spaces])
    strips = [decoders.Strip(" ", 1, 0)] if leading else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strips]
    )
    return backend


def merges_of(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that build each token from two others, best score first, as SentencePiece joins neighbours."""
    found = [
        (-scores[index], vocabulary[piece[:cut]], vocabulary[piece[cut:]], piece[:cut], piece[cut:])
        for piece, index in vocabulary.items()
        if 1 < len(piece) <= LONGEST_PIECE
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for _, _, _, left, right in found]


def _add_ends(backend: Tokenizer, reader: ConfigReader, header: Header, tokens: Sequence[str], *, starts: bool) -> None:
    """What goes around a text; `starts` is whether the beginning has a token where the file does not say."""
    around = {}
    for key, flag, default in (
        ("bos_token_id", "add_bos_token", starts),
        ("eos_token_id", "add_eos_token", False),
    ):
        index = special_id(header, key)
        around[key] = tokens[index] if index is not None and reader.flag(f"tokenizer.ggml.{flag}", default) else None
    before, after = around["bos_token_id"], around["eos_token_id"]
    if before is None and after is None:
        return
    single = [*([before] if before else []), "$A", *([after] if after else [])]
    pair = [*single, *([f"{before}:1"] if before else []), "$B:1", *([f"{after}:1"] if after else [])]
    special = [(token, tokens.index(token)) for token in dict.fromkeys((before, after)) if token]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
