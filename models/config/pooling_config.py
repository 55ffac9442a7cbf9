"""Reads pooling settings: sentence-transformers' files, config.json, and the server's own settings."""

import re
from pathlib import Path
from typing import Any, Literal

import msgspec

from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.config.hf_config import FILE, ConfigReader, whole
from troupellm.models.config.model_documents import read_json
from troupellm.models.hub.json_file import read_value
from troupellm.models.hub.model_folder import check_file
from troupellm.protocol.config.engine import ModelConfig
from troupellm.protocol.errors import ConfigError, ModelLoadError
from troupellm.protocol.params.pooling import PoolingAbility, PoolingTask, PoolingType

Activation = Literal["softmax", "sigmoid", "identity"]

MODULES, DENSE = "modules.json", "Dense"
LENGTHS = "sentence_bert_config.json"
_MODES: dict[str, PoolingType] = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_lasttoken": "LAST",
}
_NAMED_MODES: dict[str, PoolingType] = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
_ACTIVATIONS: dict[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web'
    " search query, retrieve relevant passages that answer the query\n<Query>: "
)
YES_NO_PAIR = (_BEFORE, "\n<Document>: ", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
"""The texts before, between and behind a query and a document, with which Qwen3-Reranker was trained (its card)."""
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_-]{1,64}")


class PoolerOverrides(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The setting `pooler_config`; overrides the checkpoint."""

    pooling_type: PoolingType | None = None
    seq_pooling_type: PoolingType | None = None
    """vLLM's newer name of the same."""
    use_activation: bool | None = None
    normalize: bool | None = None
    """The older name of the same, for embeddings."""
    matryoshka_dimensions: tuple[int, ...] | None = None
    score_tokens: tuple[str, str] | None = None
    """The answers of a reranker that is a decoder, for and against; each is one token."""

    @classmethod
    def read(cls, text: str | None) -> "PoolerOverrides":
        """
        Raises:
            ConfigError: not a JSON object of these.
        """
        try:
            return cls() if text is None else msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"pooler_config: {error}", param="pooler_config") from None


class DenseModule(msgspec.Struct, frozen=True, kw_only=True):
    """A layer behind the pooling, in a folder of its own."""

    folder: str
    in_features: int
    out_features: int
    bias: bool
    tanh: bool
    """Its activation; else it has none."""


class _Modules(msgspec.Struct, frozen=True):
    """The contents of modules.json."""

    pooling_type: PoolingType | None
    normalize: bool
    dense: tuple[DenseModule, ...] = ()


def max_sequence_length(folder: Path) -> int | None:
    """sentence-transformers' own limit, often lower than the model's; None if it has none.

    Raises:
        ModelLoadError: it is no positive integer.
    """
    value = whole(read_json(folder / LENGTHS).get("max_seq_length"))
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ModelLoadError(f"{LENGTHS}: max_seq_length must be a positive integer")
    return value


def read_labels(reader: ConfigReader) -> tuple[str, ...]:
    """A classifier's labels in the order of its outputs, named as `transformers` names them.

    Raises:
        ModelLoadError: id2label is no object of consecutive numbers.
    """
    names = reader.values.get("id2label")
    if names is None:
        return tuple(f"LABEL_{index}" for index in range(reader.integer("num_labels", 2)))
    if not isinstance(names, dict) or sorted(names) != sorted(map(str, range(len(names)))) or not names:
        raise reader.refuse("id2label", "must name the labels 0, 1, ...")
    return tuple(str(names[str(index)]) for index in range(len(names)))


def classifier_activation(reader: ConfigReader, num_labels: int) -> Activation:
    """The activation on a classifier's logits: the one that the checkpoint names, else a sigmoid for one label or a
    softmax.

    Only the last part of a class's dotted name is read; nothing is imported.

    Raises:
        ModelLoadError: another class.
    """
    nested = reader.values.get("sentence_transformers")
    name = nested.get("activation_fn") if isinstance(nested, dict) else None
    name = name or reader.values.get("sbert_ce_default_activation_function")
    if name is not None:
        found = _ACTIVATIONS.get(str(name).rpartition(".")[2])
        if found is None:
            raise ModelLoadError(f"{FILE}: activation {str(name)[:80]} is not supported")
        return found
    kind = reader.values.get("problem_type")
    if kind == "regression":
        return "identity"
    return "sigmoid" if num_labels == 1 or kind == "multi_label_classification" else "softmax"


def decoder_ability(
    folder: Path, reader: ConfigReader, config: ModelConfig, model: DecoderConfig
) -> PoolingAbility | None:
    """The pooling tasks of a decoder; None if the server's settings leave none.

    Raises:
        ModelLoadError: the checkpoint asks for a feature that is not built.
        ConfigError: a setting does not fit.
    """
    if model.head != "lm" and config.runner == "generate":
        raise ConfigError(f"runner generate does not fit {model.architecture}", param="runner")
    if config.runner == "pooling" and config.convert == "none" and model.head == "lm":
        raise ConfigError("convert none leaves nothing to a pooling runner", param="convert")
    if model.score_tokens is not None:
        made = classifier_ability(config, hidden_size=model.hidden_size, pooling_type="LAST", labels=("LABEL_0",))
        return msgspec.structs.replace(made, pair_format=YES_NO_PAIR)
    if model.head == "score":
        labels = read_labels(reader)
        return classifier_ability(config, hidden_size=model.hidden_size, pooling_type="LAST", labels=labels)
    if config.runner == "generate" or (config.convert == "none" and model.head == "lm"):
        return None
    return embedding_ability(folder, reader, config, hidden_size=model.hidden_size, default="LAST")


def embedding_ability(
    folder: Path,
    reader: ConfigReader,
    config: ModelConfig,
    *,
    hidden_size: int,
    default: PoolingType,
    projects: bool = False,
) -> PoolingAbility:
    """The pooling tasks of a model without a classifier.

    Args:
        projects: the caller applies `dense_modules`; without it they are refused.
        default: the pooling type where neither checkpoint nor settings name one.

    Raises:
        ModelLoadError: the checkpoint asks for a feature that is not built.
        ConfigError: a setting does not fit.
    """
    if config.convert == "classify":
        raise ConfigError("convert classify needs a checkpoint with a classifier", param="convert")
    modules, overrides = _read_modules(folder), PoolerOverrides.read(config.pooler_config)
    dense = () if modules is None else modules.dense
    if dense and not projects:
        raise _unsupported(DENSE)
    normalize = True if modules is None else modules.normalize
    for wish in (overrides.normalize, overrides.use_activation):
        normalize = normalize if wish is None else wish
    dimensions = overrides.matryoshka_dimensions
    if dimensions is None:
        dimensions = _matryoshka_dimensions(reader)
    wanted = overrides.seq_pooling_type or overrides.pooling_type
    return PoolingAbility(
        tasks=("embed",),
        pooling_type=wanted or (modules.pooling_type if modules else None) or default,
        hidden_size=dense[-1].out_features if dense else hidden_size,
        normalize=normalize,
        matryoshka=bool(dimensions) or reader.flag("is_matryoshka", False),
        matryoshka_dimensions=dimensions,
    )


def classifier_ability(
    config: ModelConfig, *, hidden_size: int, pooling_type: PoolingType, labels: tuple[str, ...]
) -> PoolingAbility:
    """Of a model with a classifier; one with a single output is a cross-encoder.

    Raises:
        ConfigError: a setting does not fit.
    """
    if config.convert == "embed":
        raise ConfigError("convert embed does not fit a checkpoint with a classifier", param="convert")
    overrides = PoolerOverrides.read(config.pooler_config)
    wanted = overrides.seq_pooling_type or overrides.pooling_type
    if wanted not in (None, pooling_type):
        raise ConfigError(f"pooler_config: this classifier reads {pooling_type}", param="pooler_config")
    tasks: tuple[PoolingTask, ...] = ("score", "classify") if len(labels) == 1 else ("classify",)
    return PoolingAbility(tasks=tasks, pooling_type=pooling_type, hidden_size=hidden_size, labels=labels)


def _matryoshka_dimensions(reader: ConfigReader) -> tuple[int, ...]:
    listed = reader.values.get("matryoshka_dimensions") or ()
    if not isinstance(listed, list | tuple) or not all(type(size) is int and size > 0 for size in listed):
        raise reader.refuse("matryoshka_dimensions", "must be a list of positive integers")
    return tuple(listed)


def logit_score_tokens(folder: Path) -> tuple[int, int | None] | None:
    """The tokens of sentence-transformers' module LogitScore, for and against; None without such a module.

    Raises:
        ModelLoadError: the files cannot be read.
    """
    for module in _listed_modules(folder) or ():
        if str(module.get("type")).rpartition(".")[2] == "LogitScore":
            path = _path_of(module)
            reader = ConfigReader(read_json(folder / path / FILE, folder), file=f"{path}/{FILE}")
            against = reader.integer("false_token_id", least=0) if reader.has("false_token_id") else None
            return reader.integer("true_token_id", least=0), against
    return None


def _listed_modules(folder: Path) -> list[dict[str, Any]] | None:
    path = folder / MODULES
    check_file(path)
    if not path.is_file():
        return None
    listed = read_value(path)
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise ModelLoadError(f"{MODULES}: expected a list of objects")
    return listed


def _read_modules(folder: Path) -> _Modules | None:
    listed = _listed_modules(folder)
    if listed is None:
        return None
    pooling_type: PoolingType | None = None
    normalize, dense = False, list[DenseModule]()
    for module in listed:
        kind = str(module.get("type")).rpartition(".")[2]
        match kind:
            case "Transformer":
                pass
            case "Normalize":
                normalize = True
            case "Pooling":
                pooling_type = _read_pooling(folder, _path_of(module))
            case "Dense":
                dense.append(_read_dense(folder, _path_of(module)))
            case _:
                raise _unsupported(kind)
    return _Modules(pooling_type, normalize, tuple(dense))


def dense_modules(folder: Path) -> tuple[DenseModule, ...]:
    """The layers behind the pooling, in their order.

    Raises:
        ModelLoadError: as `embedding_ability`.
    """
    modules = _read_modules(folder)
    return () if modules is None else modules.dense


def _unsupported(kind: str) -> ModelLoadError:
    return ModelLoadError(
        f"{MODULES}: module {kind[:80]} is not supported",
        hint="supported: Transformer, Pooling, Normalize, Dense of encoders; --runner generate does without them",
    )


def _path_of(module: dict[str, Any]) -> str:
    path = str(module.get("path"))
    if not _PLAIN_PATH.fullmatch(path):
        raise ModelLoadError(f"{MODULES}: {path[:80]!r} is not the name of a folder beside it")
    return path


def _read_dense(folder: Path, path: str) -> DenseModule:
    reader = ConfigReader(read_json(folder / path / FILE, folder), file=f"{path}/{FILE}")
    activation = str(reader.values.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in ("Identity", "Tanh"):
        raise reader.refuse("activation_function", "must be Identity or Tanh")
    return DenseModule(
        folder=path,
        in_features=reader.integer("in_features"),
        out_features=reader.integer("out_features"),
        bias=reader.flag("bias", True),
        tanh=activation == "Tanh",
    )


def _read_pooling(folder: Path, path: str) -> PoolingType:
    """The one mode that a Pooling module's configuration switches on."""
    name = f"{path}/{FILE}"
    settings = read_json(folder / path / FILE, folder)
    given = settings.get("pooling_mode")
    if isinstance(given, str):
        if given not in _NAMED_MODES:
            raise ModelLoadError(f"{name}: pooling_mode {given[:40]} is not supported")
        return _NAMED_MODES[given]
    modes = [mode for mode, value in settings.items() if mode.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelLoadError(
            f"{name}: pooling by {' and '.join(modes) or 'nothing'} is not supported",
            hint=f"supported is one of {', '.join(_MODES)}",
        )
    return _MODES[modes[0]]
