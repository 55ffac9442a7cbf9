"""Outputs of pooling for scripts, with vLLM's names and fields."""

from typing import Any, Self

import msgspec


class PoolingOutput(msgspec.Struct, frozen=True):
    data: list[float]


class EmbeddingOutput(msgspec.Struct, frozen=True):
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        return cls(output.data)


class ClassificationOutput(msgspec.Struct, frozen=True):
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        return cls(output.data)


class ScoringOutput(msgspec.Struct, frozen=True):
    score: float

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """
        Raises:
            ValueError: the output has more than one number.
        """
        (score,) = output.data
        return cls(score)


class PoolingRequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and its pooled output."""

    request_id: str
    outputs: PoolingOutput | EmbeddingOutput | ClassificationOutput | ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


class EmbeddingRequestOutput(PoolingRequestOutput, frozen=True, kw_only=True):
    @classmethod
    def from_base(cls, output: PoolingRequestOutput) -> Self:
        return cls(**_fields(output, EmbeddingOutput))


class ClassificationRequestOutput(PoolingRequestOutput, frozen=True, kw_only=True):
    @classmethod
    def from_base(cls, output: PoolingRequestOutput) -> Self:
        return cls(**_fields(output, ClassificationOutput))


class ScoringRequestOutput(PoolingRequestOutput, frozen=True, kw_only=True):
    @classmethod
    def from_base(cls, output: PoolingRequestOutput) -> Self:
        return cls(**_fields(output, ScoringOutput))


def _fields(
    output: PoolingRequestOutput, kind: type[EmbeddingOutput | ClassificationOutput | ScoringOutput]
) -> dict[str, Any]:
    fields = msgspec.structs.asdict(output)
    if isinstance(output.outputs, PoolingOutput):
        fields["outputs"] = kind.from_base(output.outputs)
    return fields
