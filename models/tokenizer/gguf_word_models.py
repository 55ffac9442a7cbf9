"""Tokenizer models of GGUF files other than byte-level BPE: SentencePiece's BPE and Unigram, BERT's WordPiece."""

from array import array
from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from troupellm.models.config.gguf_special_tokens import BYTE, CONTROL, UNKNOWN, UNUSED
from troupellm.models.config.hf_config import ConfigReader
from troupellm.models.tokenizer.tokenizer_bombs import check_charsmap
from troupellm.protocol.errors import ModelLoadError

SPACE = "\u2581"
LONGEST_PIECE = 256
"""Characters of a token that merges are worked out for: their number grows with the length."""
_NEVER_MERGED = frozenset({UNKNOWN, CONTROL, UNUSED, BYTE})


def scores_of(reader: ConfigReader, file: str, tokens: Sequence[str]) -> list[float]:
    """One score per token; best is highest.

    Raises:
        ModelLoadError: not as many numbers as tokens.
    """
    scores = reader.values.get("tokenizer.ggml.scores", array("f"))
    if not isinstance(scores, array):
        raise reader.refuse("tokenizer.ggml.scores", "must be an array of numbers")
    if len(scores) != len(tokens):
        raise ModelLoadError(f"{file}: tokenizer.ggml.scores is for {len(scores)} of {len(tokens)} tokens")
    return scores.tolist()


def sentence_pieces(
    tokens: Sequence[str], merges: list[tuple[str, str]], unknown: int | None, *, leading_space: bool
) -> Tokenizer:
    """BPE over characters, with a token for each byte of a character that is no token."""
    ids = {token: index for index, token in enumerate(tokens)}
    name = None if unknown is None else tokens[unknown]
    backend = Tokenizer(models.BPE(ids, merges, unk_token=name, fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(space_rules(merge=False, lead=leading_space))
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *_strips(leading_space)]
    )
    return backend


def space_rules(*, merge: bool, lead: bool) -> list[normalizers.Normalizer]:
    """SentencePiece's rules for spaces, which become U+2581.

    Args:
        merge: whether spaces at both ends go, and only one stays of several.
        lead: whether each text between special tokens gets a space in front.
    """
    rules: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    if merge:  # written U+2581 counts as a space at the end only
        before = [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        rules = [*before, *rules, normalizers.Replace(Regex(rf"{SPACE}+\z"), "")]
    return [*rules, normalizers.Prepend(SPACE)] if lead else rules


def _strips(leading: bool) -> list[decoders.Decoder]:
    return [decoders.Strip(" ", 1, 0)] if leading else []


def scored_merges(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that build each ordinary token from two others, as SentencePiece joins neighbours."""
    pieces = {token: index for index, token in enumerate(tokens) if kinds[index] not in _NEVER_MERGED}
    return merges_of(pieces, scores)


def merges_of(vocabulary: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that make a third one, best score of the third first."""
    found = [
        (-scores[index], vocabulary[piece[:cut]], vocabulary[piece[cut:]], piece[:cut], piece[cut:])
        for piece, index in vocabulary.items()
        if 1 < len(piece) <= LONGEST_PIECE
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for _, _, _, left, right in found]


def unigram(
    reader: ConfigReader, tokens: Sequence[str], scores: Sequence[float], unknown: int, *, leading_space: bool
) -> Tokenizer:
    """SentencePiece's Unigram, as T5 has it; the normalization is the file's `precompiled_charsmap`."""
    backend = Tokenizer(models.Unigram(list(zip(tokens, scores, strict=True)), unknown, byte_fallback=False))
    steps: list[normalizers.Normalizer] = []
    charsmap = reader.values.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap is not None:
        if not isinstance(charsmap, array) or charsmap.itemsize != 1:
            raise reader.refuse("tokenizer.ggml.precompiled_charsmap", "must be an array of bytes")
        check_charsmap(charsmap.tobytes(), reader.place_of("tokenizer.ggml.precompiled_charsmap"))
        steps.append(normalizers.Precompiled(charsmap.tobytes()))
    merge = reader.flag("tokenizer.ggml.remove_extra_whitespaces", False)
    backend.normalizer = normalizers.Sequence([*steps, *space_rules(merge=merge, lead=leading_space)])
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.Fuse(), *_strips(leading_space)])
    return backend


def word_pieces(
    tokens: Sequence[str], kinds: Sequence[int], unknown: str, *, lowercase: bool, strip_accents: bool
) -> Tokenizer:
    """BERT's WordPiece. The file marks the start of a word by U+2581; BERT marks what continues one by `##`."""
    ids = {
        token if kind in (CONTROL, UNKNOWN) else token[1:] if token.startswith(SPACE) else f"##{token}": index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    }
    if len(ids) != len(tokens):
        raise ModelLoadError("tokenizer.ggml.tokens has a token twice")
    backend = Tokenizer(models.WordPiece(ids, unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend
