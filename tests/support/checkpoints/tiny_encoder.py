"""Small encoders with random weights, as `transformers` saves them, and a WordPiece tokenizer beside them."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?"
VOCABULARY = len(SPECIAL_TOKENS) + 2 * len(LETTERS)
POSITIONS = 96
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": POSITIONS, "initializer_range": 0.3,
}  # fmt: skip
DISTIL_SIZES = {
    "vocab_size": VOCABULARY, "dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 4,
    "max_position_embeddings": POSITIONS, "initializer_range": 0.3,
}  # fmt: skip

Make = Callable[[], transformers.PreTrainedModel]


def bert(labels: int = 0, **more: object) -> transformers.PreTrainedModel:
    config = transformers.BertConfig(**(SIZES | more), **_labels(labels))
    return transformers.BertForSequenceClassification(config) if labels else transformers.BertModel(config)


def roberta(labels: int = 0, **more: object) -> transformers.PreTrainedModel:
    config = transformers.RobertaConfig(**(SIZES | more), type_vocab_size=1, **_labels(labels))
    return transformers.RobertaForSequenceClassification(config) if labels else transformers.RobertaModel(config)


def xlm_roberta(labels: int = 0, **more: object) -> transformers.PreTrainedModel:
    config = transformers.XLMRobertaConfig(**(SIZES | more), type_vocab_size=1, **_labels(labels))
    kind = transformers.XLMRobertaForSequenceClassification if labels else transformers.XLMRobertaModel
    return kind(config)


def distilbert(labels: int = 0, **more: object) -> transformers.PreTrainedModel:
    config = transformers.DistilBertConfig(**(DISTIL_SIZES | more), **_labels(labels))
    kind = transformers.DistilBertForSequenceClassification if labels else transformers.DistilBertModel
    return kind(config)


def write_encoder(
    folder: Path, make: Make, *, pooling: str | None = None, normalize: bool = True, max_length: int | None = None
) -> transformers.PreTrainedModel:
    """Write the checkpoint and its tokenizer; the model itself, as a reference.

    Args:
        pooling: sentence-transformers' name of a mode, for modules.json; None writes no such file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(5)
    model = make().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name.lower() or name.endswith("bias"):  # fresh ones are all 1 or all 0, which hides mistakes
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    write_wordpiece(folder)
    if pooling is not None:
        write_modules(folder, pooling, normalize=normalize)
    if max_length is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))
    return model


def write_modules(folder: Path, pooling: str, *, normalize: bool) -> None:
    """sentence-transformers' own files."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    listed = [
        {
            "idx": index,
            "name": str(index),
            "path": "" if index == 0 else f"{index}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48} | modes))


def write_wordpiece(folder: Path) -> None:
    """Every letter is a token of its own, at the start of a word and inside of one."""
    words = [*SPECIAL_TOKENS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.enable_truncation(8)  # as checkpoints have it, to be overruled
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"})
    )


def _labels(number: int) -> dict[str, object]:
    return {"num_labels": number} if number else {}
