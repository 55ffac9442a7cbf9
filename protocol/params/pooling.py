"""Pooling: one vector for a prompt instead of text. vLLM's names, rules and refusals."""

from typing import Literal, get_args

import msgspec

from troupellm.protocol.errors import InvalidRequest

PoolingTask = Literal["embed", "classify", "score"]
"""embed: a vector for the text. classify: a probability per label. score: the one number of a cross-encoder."""
PoolingType = Literal["CLS", "LAST", "MEAN"]
"""Which tokens' hidden states make the vector: the first's, the last's, or the mean of all."""
POOLING_TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)
TASKS_ELSEWHERE = ("token_embed", "token_classify", "plugin", "embed&token_classify")
"""vLLM's names of the tasks that are not supported here."""

_INTEGERS = {"dimensions": (1, 2**31 - 1), "priority": (-(2**31), 2**31 - 1)}


class PoolingState(msgspec.Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """The pooling settings of a row, for the worker."""

    task: PoolingTask
    pooling_type: PoolingType
    activation: bool = True
    """Unit length for an embedding; for the others softmax or sigmoid, as the model has it."""
    dimensions: int = 0
    """Of an embedding only so many first numbers; 0 is all."""
    segment: int = 0
    """Position of the first token of a pair's second text, for models that tell them apart; 0 where there is none."""

    @property
    def reads_prefix_cache(self) -> bool:
        """Whether earlier positions may come from the prefix cache: only the last one's hidden state is wanted."""
        return self.pooling_type == "LAST"


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to pool a prompt.

    Raises:
        InvalidRequest: a value has the wrong type or is out of range; names the field and the range.
    """

    task: PoolingTask | None = None
    """None is what the model was made for."""
    dimensions: int | None = None
    """Length of the embedding; only of models that were trained for it (Matryoshka)."""
    use_activation: bool | None = None
    """None does what the model was made for."""
    priority: int = 0
    """Lower runs earlier under the priority policy."""

    def __post_init__(self) -> None:
        if self.task in TASKS_ELSEWHERE:
            raise InvalidRequest(
                f"the task {self.task} is not supported; supported are {', '.join(POOLING_TASKS)}",
                param="task",
                code="unsupported_parameter",
            )
        if self.task is not None and self.task not in POOLING_TASKS:
            raise InvalidRequest(f"task must be one of {', '.join(POOLING_TASKS)}", param="task")
        for field, (least, most) in _INTEGERS.items():
            value = getattr(self, field)
            if value is None and field == "dimensions":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidRequest(f"{field} must be an integer", param=field, code="invalid_type")
            if not least <= value <= most:
                raise InvalidRequest(f"{field} must be in [{least}, {most}], got {value}", param=field)
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            raise InvalidRequest("use_activation must be true or false", param="use_activation", code="invalid_type")


class PoolingAbility(msgspec.Struct, frozen=True, kw_only=True):
    """The pooling tasks of the loaded model."""

    tasks: tuple[PoolingTask, ...]
    """The first is what it was made for."""
    pooling_type: PoolingType
    hidden_size: int
    """Numbers in an embedding."""
    normalize: bool = True
    """Embeddings have unit length unless asked otherwise."""
    matryoshka: bool = False
    """The first numbers of an embedding are an embedding too."""
    matryoshka_dimensions: tuple[int, ...] = ()
    """How many that may be; empty is any number."""
    labels: tuple[str, ...] = ()
    """The labels of a classifier."""
    pair_format: tuple[str, str, str] | None = None
    """The texts before, between and behind the two texts of a pair; None joins them as the tokenizer does."""

    @property
    def scores_by_vectors(self) -> bool:
        """Texts are compared by their embeddings, since no cross-encoder reads them together."""
        return "score" not in self.tasks and "embed" in self.tasks

    def task_of(self, params: PoolingParams) -> PoolingTask:
        """
        Raises:
            InvalidRequest: the model does not do the task.
        """
        task = params.task or self.tasks[0]
        if task not in self.tasks:
            raise InvalidRequest(
                f"the model does not support the task {task}; it supports {', '.join(self.tasks)}",
                param="model",
                code="unsupported_task",
            )
        return task

    def resolve(self, params: PoolingParams, *, segment: int = 0) -> PoolingState:
        """The settings for the worker.

        Raises:
            InvalidRequest: the model does not do it; names the field.
        """
        task = self.task_of(params)
        if params.dimensions is not None:
            self._check_dimensions(task, params.dimensions)
        activation = params.use_activation
        if activation is None:
            activation = self.normalize if task == "embed" else True
        return PoolingState(
            task=task,
            pooling_type=self.pooling_type,
            activation=activation,
            dimensions=params.dimensions or 0,
            segment=segment,
        )

    def vector_length(self, state: PoolingState) -> int:
        """Numbers in what the worker answers."""
        if state.task == "embed":
            return state.dimensions or self.hidden_size
        return len(self.labels)

    def _check_dimensions(self, task: PoolingTask, dimensions: int) -> None:
        if task != "embed":
            raise InvalidRequest(f"dimensions has no meaning for the task {task}", param="dimensions")
        if not self.matryoshka:
            raise InvalidRequest(
                "the model does not support dimensions: it has no Matryoshka representation, so that a part of its"
                " embedding is none",
                param="dimensions",
                code="unsupported_parameter",
            )
        if self.matryoshka_dimensions and dimensions not in self.matryoshka_dimensions:
            listed = ", ".join(map(str, self.matryoshka_dimensions))
            raise InvalidRequest(f"dimensions must be one of {listed}, got {dimensions}", param="dimensions")
        if dimensions > self.hidden_size:
            raise InvalidRequest(f"dimensions must be in [1, {self.hidden_size}], got {dimensions}", param="dimensions")
