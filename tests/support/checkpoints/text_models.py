"""Small tokenizers of each decoder form, in Hugging Face's format."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "She sells sea shells; the shells she sells are sea shells.",
    "日本語のテキストと 🎉🎉 emoji, naïve café, Привет мир",
    "def main():\n    return [x for x in range(10)]\n",
)


def byte_level(folder: Path) -> Path:
    """Byte level BPE with merges, so that tokens end inside of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|start|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    return _save(tokenizer, folder)


def byte_fallback(folder: Path, *, bos: bool = True) -> Path:
    """A converted SentencePiece model: pieces of text, and a token for each byte."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    tokens += [*"abcdefghijklmnopqrstuvwxyz.,é", "th", "the", "\u2581the", "\u2581a", "in"]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "a"), ("i", "n")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _save(tokenizer, folder)


def word_piece(folder: Path) -> Path:
    """A form that only the library can decode."""
    tokens = ["[UNK]", "the", "fox", "##es", "jump", "##ing", "!", "é"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.add_special_tokens(["[UNK]"])
    return _save(tokenizer, folder)


def panicking(folder: Path) -> Path:
    """One at which the library panics with any text but an empty one."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.FixedLength(length=0)
    return _save(tokenizer, folder)


def _save(tokenizer: Tokenizer, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
