"""The tokenizer that a GGUF file describes, built from the `tokenizers` library's parts.

The rules are those of llama.cpp's src/llama-vocab.cpp, and where the model's own tokenizer.json differs, its rules.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from troupellm.models.config.gguf_special_tokens import CONTROL, UNKNOWN, USER_DEFINED, special_id, vocabulary
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.hub.gguf_header import Header, read_header
from troupellm.models.processes.rust_panics import no_panics
from troupellm.models.tokenizer.gguf_pre_tokenizers import pre_tokenizer
from troupellm.models.tokenizer.gguf_word_models import scored_merges, scores_of, sentence_pieces, unigram, word_pieces
from troupellm.protocol.errors import ModelLoadError

KINDS = ("gpt2", "llama", "gemma4", "bert", "t5")
_STARTS = frozenset({"llama", "bert"})
"""Models whose prompts start with BOS where the file does not say; for gpt2 it goes by `tokenizer.ggml.pre`."""
_FINISHES = frozenset({"t5"})


def gguf_tokenizer(path: Path) -> Tokenizer:
    """
    Raises:
        ModelLoadError: no tokenizer, one of a kind that is not supported, or one that contradicts itself.
    """
    header = read_header(path)
    reader = ConfigReader(header.metadata, file=header.name)
    try:
        kind = reader.choice("tokenizer.ggml.model", KINDS)
    except ModelLoadError as error:
        raise ModelLoadError(
            error.message, hint="name a folder with the model's tokenizer.json by --tokenizer"
        ) from None
    tokens, kinds = vocabulary(header)
    if len(set(tokens)) != len(tokens):
        raise ModelLoadError(f"{header.name}: tokenizer.ggml.tokens has a token twice")
    try:
        with no_panics("tokenizers"):
            backend = _backend(kind, reader, header, tokens, kinds)
            _add_tokens(backend, tokens, kinds)
            _add_ends(backend, kind, reader, header, tokens)
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{header.name}: the tokenizer cannot be built: {error}") from error
    return backend


def _backend(kind: str, reader: ConfigReader, header: Header, tokens: Sequence[str], kinds: Sequence[int]) -> Tokenizer:
    if kind == "gpt2":
        return _byte_level(reader, tokens)
    unknown = special_id(header, "unknown_token_id")
    if kind == "bert":
        lowercase = reader.flag("tokenizer.ggml.normalizer.lowercase", True)
        accents = reader.flag("tokenizer.ggml.normalizer.strip_accents", lowercase)
        return word_pieces(tokens, kinds, tokens[unknown or 0], lowercase=lowercase, strip_accents=accents)
    if kind == "gemma4":
        return sentence_pieces(tokens, _merges(reader), unknown, leading_space=False)
    scores = scores_of(reader, header.name, tokens)
    leading = reader.flag("tokenizer.ggml.add_space_prefix", kind == "llama")
    if kind == "t5":
        return unigram(reader, tokens, scores, unknown or 0, leading_space=leading)
    return sentence_pieces(tokens, scored_merges(tokens, kinds, scores), unknown or 0, leading_space=leading)


def _byte_level(reader: ConfigReader, tokens: Sequence[str]) -> Tokenizer:
    rule = pre_tokenizer(reader)
    ids = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(ids, _merges(reader), ignore_merges=rule.whole_first))
    if rule.compose:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(reader: ConfigReader) -> list[tuple[str, str]]:
    """Pairs, each cut at its first space that is not its first character: a token may begin with a space."""
    key = "tokenizer.ggml.merges"
    merges = reader.values.get(key)
    if not isinstance(merges, list) or not merges or not all(isinstance(merge, str) for merge in merges):
        raise reader.refuse(key, "must be pairs of tokens")
    pairs = []
    for merge in merges:
        cut = merge.find(" ", 1)
        if cut < 0:
            raise reader.refuse(key, f"must be pairs of tokens, and {merge!r:.80} is none")
        pairs.append((merge[:cut], merge[cut + 1 :]))
    return pairs


def _add_tokens(backend: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Tokens that are found in the raw text, before it is normalized or cut into words."""
    for special, wanted in ((False, (USER_DEFINED,)), (True, (CONTROL, UNKNOWN))):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in wanted
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)


def _add_ends(backend: Tokenizer, kind: str, reader: ConfigReader, header: Header, tokens: Sequence[str]) -> None:
    """The tokens around a prompt.

    gemma4 gets no BOS: the model's chat template writes it (llama.cpp adds it to every text, transformers never).
    """
    starts = pre_tokenizer(reader).starts if kind == "gpt2" else kind in _STARTS
    before = after = None
    if kind != "gemma4" and reader.flag("tokenizer.ggml.add_bos_token", starts):
        before = special_id(header, "bos_token_id")
    if kind == "bert":
        after = special_id(header, "seperator_token_id")
    elif reader.flag("tokenizer.ggml.add_eos_token", kind in _FINISHES):
        after = special_id(header, "eos_token_id")
    if before is None and after is None:
        return
    first, last = ("" if index is None else tokens[index] for index in (before, after))
    single = [*([first] if first else []), "$A", *([last] if last else [])]
    again = [] if kind == "bert" or not first else [f"{first}:1"]
    pair = [*single, *again, "$B:1", *([f"{last}:1"] if last else [])]
    special = [(tokens[index], index) for index in dict.fromkeys((before, after)) if index is not None]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
