"""The rules by which byte-level vocabularies of GGUF files cut text into words, by `tokenizer.ggml.pre`.

Names and rules are those of llama.cpp's src/llama-vocab.cpp; the patterns are spelled as the models' own
tokenizer.json files spell them. Several patterns cut one after the other, each of them the pieces of the one before.
"""

from typing import NamedTuple

from troupellm.models.config.hf_config import ConfigReader
from troupellm.protocol.errors import ModelLoadError


class PreTokenizer(NamedTuple):
    """The steps that a text takes before its merges."""

    patterns: tuple[str, ...]
    whole_first: bool = False
    """A word that is a token is not merged from its letters."""
    starts: bool = False
    """Prompts start with BOS unless the file says otherwise."""
    compose: bool = False
    """Text is normalized to Unicode's form NFC."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LETTERS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_CL100K = _LETTERS + r"|\p{N}{1,3}" + _TAIL
_QWEN = _LETTERS + r"|\p{N}" + _TAIL
_MARKS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)


def _cased(ending: str, digits: str, marks: str = r"\p{Lm}\p{Lo}\p{M}", tail: str = "/") -> str:
    """Words end where a lower-case letter is followed by an upper-case one; OpenAI's o200k is the first of the kind."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}[\p{{Lu}}\p{{Lt}}{marks}]*[\p{{Ll}}{marks}]+{ending}"
        rf"|{start}[\p{{Lu}}\p{{Lt}}{marks}]+[\p{{Ll}}{marks}]*{ending}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{tail}]*|{_SPACES}"
    )


_O200K = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
_TEKKEN = _cased("", r"\p{N}")
_KIMI = r"[\p{Han}]+|" + _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}", r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]", "")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
    ),
)
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-"
    "\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57"
    "\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-"
    "\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-"
    "\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-"
    "\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-"
    "\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Some letters that have upper and lower case, as DeepSeek LLM's tokenizer.json spells them out."""
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _DIGIT)
_FALCON = (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")
_SEED_CODER = rf"{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"

_ROWS = {
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral lfm2": PreTokenizer((_CL100K,), whole_first=True, starts=True),
    "dbrx smaug-bpe glm4 chatglm-bpe": PreTokenizer((_CL100K,)),
    "qwen2 deepseek-r1-qwen megrez": PreTokenizer((_QWEN,), compose=True),
    "qwen35": PreTokenizer((_MARKS,), compose=True),
    "stablelm2 hunyuan solar-open": PreTokenizer((_QWEN,)),
    "gpt-2 phi-2 mpt olmo exaone4 jais modern-bert": PreTokenizer((_GPT2,)),
    "smollm starcoder refact exaone": PreTokenizer((_DIGIT, _GPT2)),
    "command-r": PreTokenizer((_DIGIT, _GPT2), compose=True),
    "tekken": PreTokenizer((_TEKKEN,), whole_first=True, starts=True),
    "gpt-4o llama4 minimax-m2": PreTokenizer((_O200K,)),
    "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "deepseek-v3 hunyuan-dense": PreTokenizer(_DEEPSEEK3),
    "seed-coder": PreTokenizer((_SEED_CODER,)),
    "bailingmoe": PreTokenizer((_BAILING,)),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "falcon": PreTokenizer(_FALCON),
}
PRE_TOKENIZERS = {name: row for names, row in _ROWS.items() for name in names.split()}
_OF_ARCHITECTURE = {
    "qwen2": "qwen2", "qwen2moe": "qwen2", "qwen3": "qwen2", "qwen3moe": "qwen2", "gpt-oss": "gpt-4o",
}  # fmt: skip
"""Files of these architectures that name no rule were made before there were names; their models share one rule."""


def pre_tokenizer(reader: ConfigReader) -> PreTokenizer:
    """The rule that a file names, or else that of its architecture.

    Args:
        reader: of the file's metadata.

    Raises:
        ModelLoadError: the file names none, and models of its architecture differ; or it names one that is not known.
    """
    key, hint = "tokenizer.ggml.pre", "name a folder with the model's tokenizer.json by --tokenizer"
    name = reader.values.get(key) or "default"
    if name == "default":
        architecture = reader.values.get("general.architecture")
        name = _OF_ARCHITECTURE.get(architecture) if isinstance(architecture, str) else None
        if name is None:
            error = reader.refuse(key, f"does not say how text is cut into words, nor does architecture {architecture}")
            raise ModelLoadError(error.message, hint=hint)
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ModelLoadError(reader.refuse(key, f"must be one of {', '.join(PRE_TOKENIZERS)}").message, hint=hint)
    return PRE_TOKENIZERS[name]
