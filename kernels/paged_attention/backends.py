"""Attention back ends: an ordered list, from which the first suitable one or the requested one is taken.

Unsupported features are found before the first step, from the shapes and features of the model's layers, and reported
by name: a model is never served with an attention that leaves out its soft cap.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from troupellm.kernels.common.triton import installed, usable
from troupellm.kernels.paged_attention import cpu as native, row_by_row
from troupellm.kernels.paged_attention.device_plan import MOST_PACKED, AttentionShape, DevicePlan
from troupellm.kernels.paged_attention.plan import AttentionPlan
from troupellm.kernels.paged_attention.reference import paged_attention_reference
from troupellm.kernels.paged_attention.row_plan import RowPlan, RowSpan
from troupellm.kernels.paged_attention.tree import TreeMask
from troupellm.protocol.errors import ConfigError

Ints = NDArray[np.int64]

WIDEST_HEAD = 512
WIDEST_LATENT = 512
"""Limits of the Triton kernels' tiles."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Needs:
    """The combined requirements of a model's attention layers."""

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: torch.dtype | None = None
    """Type of the cache, if it differs from that of the queries."""
    softcap: bool = False
    sinks: bool = False
    latent: int = 0
    """See `device_plan.AttentionShape`."""
    batch_invariant: bool = False


class Backend(ABC):
    """One way to compute `paged_attention`."""

    name: ClassVar[str]
    also: ClassVar[tuple[str, ...]] = ()
    """Other names, as vLLM spells them."""

    @abstractmethod
    def refuses(self, needs: Needs) -> str | None:
        """Why it cannot, in words that go on from "the back end"; None where it can."""

    @abstractmethod
    def plan(
        self,
        tables: NDArray[np.int32],
        starts: Ints,
        counts: Ints,
        needs: Needs,
        window: int | None,
        tree: TreeMask | None = None,
    ) -> Any:
        """The plan that `paged_attention` takes, for a step as of `plan.AttentionPlan`."""


class Triton(Backend):
    """Our kernels for a GPU."""

    name, also = "triton", ("triton_attn",)

    def refuses(self, needs: Needs) -> str | None:
        if not installed():
            return "needs the package triton, which is not installed"
        if not usable(needs.device):
            return f"runs on a GPU, and the device is {needs.device.type}"
        if needs.dtype not in FLOATS:
            return f"computes in float32, bfloat16 and float16, not in {needs.dtype}"
        if needs.latent:
            return self._refuses_latent(needs)
        if needs.head_dim > WIDEST_HEAD:
            return f"takes heads of up to {WIDEST_HEAD}, not of {needs.head_dim}"
        if needs.kv_dtype == torch.int8 and needs.head_dim % 4:
            return f"reads the scales of int8 caches as whole words: heads of a multiple of 4, not of {needs.head_dim}"
        if needs.num_heads // needs.num_kv_heads > MOST_PACKED:
            return f"takes up to {MOST_PACKED} heads for each KV head"
        return None

    @staticmethod
    def _refuses_latent(needs: Needs) -> str | None:
        if needs.latent > WIDEST_LATENT:
            return f"takes latent vectors of up to {WIDEST_LATENT}, not of {needs.latent}"
        if needs.kv_dtype == torch.int8:
            return "reads latent vectors in the type of the model or fp8, not in int8"
        if needs.batch_invariant:
            return "shares the tiles of latent vectors by what else is in the batch, so it is not batch-invariant"
        return None

    def plan(
        self,
        tables: NDArray[np.int32],
        starts: Ints,
        counts: Ints,
        needs: Needs,
        window: int | None,
        tree: TreeMask | None = None,
    ) -> Any:
        kv_dtype = needs.kv_dtype or needs.dtype
        shape = AttentionShape(
            needs.num_heads,
            needs.num_kv_heads,
            needs.head_dim,
            needs.block_size,
            window,
            kv_dtype,
            needs.latent,
        )
        return DevicePlan.from_host(
            tables, starts, counts, shape=shape, device=needs.device, invariant=needs.batch_invariant, tree=tree
        )


class Torch(Backend):
    """Blocks gathered for rows of like lengths, then torch's dense attention."""

    name = "torch"
    also: ClassVar[tuple[str, ...]] = ("cpu_attn",)
    native: ClassVar[bool] = False

    def refuses(self, needs: Needs) -> str | None:
        return None if needs.device.type == "cpu" else f"runs on a CPU, and the device is {needs.device.type}"

    def plan(
        self,
        tables: NDArray[np.int32],
        starts: Ints,
        counts: Ints,
        needs: Needs,
        window: int | None,
        tree: TreeMask | None = None,
    ) -> Any:
        return AttentionPlan(
            tables,
            starts,
            counts,
            block_size=needs.block_size,
            num_kv_heads=needs.num_kv_heads,
            window=window,
            compiled=self.native,
            by_token=needs.batch_invariant,
            tree=tree,
        )


class Native(Torch):
    """Our C++, built by the machine's compiler."""

    name = "native"
    also = ()
    native = True

    def refuses(self, needs: Needs) -> str | None:
        if (reason := super().refuses(needs)) is not None:
            return reason
        if needs.dtype != torch.float32:
            return f"computes in float32, not in {needs.dtype}"
        if not native.supports(*(torch.empty(1, 1, needs.head_dim, dtype=needs.dtype) for _ in range(2))):
            return f"takes heads of a multiple of 16 up to {native.MAX_LATENT}, not of {needs.head_dim}"
        if native.load() is None:
            return "needs a C++ compiler whose code agrees with the reference"
        return None


class RowByRow(Backend):
    """Each row's keys gathered, then one operator per row."""

    def refuses(self, needs: Needs) -> str | None:
        if needs.batch_invariant:
            return "orders its sums by how many tokens a row has in a step, so it is not batch-invariant"
        return None

    def plan(
        self,
        tables: NDArray[np.int32],
        starts: Ints,
        counts: Ints,
        needs: Needs,
        window: int | None,
        tree: TreeMask | None = None,
    ) -> Any:
        rows = RowPlan(
            tables, starts, counts, block_size=needs.block_size, window=window, device=needs.device, tree=tree
        )
        return Planned(self, rows)

    def attend(
        self,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        plan: RowPlan,
        scale: float,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """The attention of tokens [tokens, heads, head_dim], in the same shape; tokens of no row get zeros."""
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        for span in plan.rows:
            keys, values = (span.gather(cache, query.dtype) for cache in caches)
            attended = self.row(query[span.tokens].transpose(0, 1), keys, values, span, scale, softcap, sinks)
            out[span.tokens] = attended.transpose(0, 1)
        return out

    @abstractmethod
    def row(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        span: RowSpan,
        scale: float,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """As `row_by_row.sdpa`."""


class Sdpa(RowByRow):
    """torch's scaled_dot_product_attention."""

    name, also = "sdpa", ("torch_sdpa",)

    def refuses(self, needs: Needs) -> str | None:
        if needs.softcap:
            return "has no soft cap of scores, which this model needs"
        return super().refuses(needs)

    def row(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        span: RowSpan,
        scale: float,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        return row_by_row.sdpa(query, keys, values, span, scale, softcap, sinks)


class Flex(RowByRow):
    """torch's flex attention."""

    name, also = "flex", ("flex_attention",)

    def refuses(self, needs: Needs) -> str | None:
        if needs.device.type != "cuda":
            return "is compiled for GPUs only: elsewhere torch has it as a definition, too slow to serve with"
        return super().refuses(needs)

    def row(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        span: RowSpan,
        scale: float,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        return row_by_row.flex(query, keys, values, span, scale, softcap, sinks)


class Reference(RowByRow):
    """The definition, token by token in float32: a reference to check the others against."""

    name, also = "reference", ()

    def refuses(self, needs: Needs) -> str | None:
        if needs.kv_dtype not in (None, needs.dtype):
            return f"reads caches of the type of the model, not of {needs.kv_dtype}"
        return None

    def attend(
        self,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        plan: RowPlan,
        scale: float,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        out = paged_attention_reference(
            query, *caches, plan.tables, plan.items, scale=scale, softcap=softcap, sinks=sinks, tree=plan.tree
        )
        out[plan.num_tokens :] = 0
        return out

    def row(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        span: RowSpan,
        scale: float,
        softcap: float,
        sinks: Tensor | None,
    ) -> Tensor:
        raise NotImplementedError("computed for all rows together")


@dataclass(frozen=True, slots=True)
class Planned:
    """A step's rows and the back end that computes them."""

    backend: RowByRow
    rows: RowPlan


BACKENDS: tuple[Backend, ...] = (Triton(), Native(), Torch(), Sdpa(), Flex(), Reference())
"""All back ends, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans the steps of one model for one back end."""

    backend: Backend
    needs: Needs

    def __call__(
        self, tables: NDArray[np.int32], starts: Ints, counts: Ints, window: int | None, tree: TreeMask | None = None
    ) -> Any:
        """The plan that `paged_attention` takes; arguments as of `plan.AttentionPlan`."""
        return self.backend.plan(tables, starts, counts, self.needs, window, tree)

    def with_heads(self, num_heads: int, num_kv_heads: int, head_dim: int) -> "Planner":
        """The planner of layers with other heads."""
        needs = replace(self.needs, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        return self if needs == self.needs else Planner(self.backend, needs)

    @property
    def compiled(self) -> bool:
        """True if our C++ computes it."""
        return isinstance(self.backend, Native)


def choose(needs: Needs, name: str = "auto", *others: Needs) -> Backend:
    """The back end of that name, or the first suitable one.

    Args:
        others: of layers with other heads, which it must suit, too.

    Raises:
        ConfigError: there is none of that name, or it, or none at all, can do what the model needs; `param` is
            attention_backend.
    """
    every = (needs, *others)
    able = [backend for backend in BACKENDS if _refuses(backend, every) is None]
    if name == "auto":
        if not able:
            raise ConfigError(_none_can(every), param="attention_backend")
        return able[0]
    for backend in BACKENDS:
        if name.lower() in (backend.name, *backend.also):
            if (reason := _refuses(backend, every)) is None:
                return backend
            can = f"here one of auto, {', '.join(other.name for other in able)} can" if able else _none_can(every)
            raise ConfigError(f"attention_backend {backend.name} {reason}; {can}", param="attention_backend")
    names = ", ".join(("auto", *(backend.name for backend in BACKENDS)))
    raise ConfigError(f"attention_backend {name} is not known; one of {names}", param="attention_backend")


def _refuses(backend: Backend, every: Sequence[Needs]) -> str | None:
    """As `Backend.refuses`, of the first layers that it cannot compute."""
    return next((reason for needs in every if (reason := backend.refuses(needs)) is not None), None)


def _none_can(every: Sequence[Needs]) -> str:
    """Why not, each by its reason, and the settings of which any one would do if it were another."""
    reasons = "; ".join(f"{backend.name} {_refuses(backend, every)}" for backend in BACKENDS)
    changes = {
        "kv_cache_dtype auto": [replace(needs, kv_dtype=None) for needs in every],
        "no batch_invariant": [replace(needs, batch_invariant=False) for needs in every],
        "device cpu": [replace(needs, device=torch.device("cpu")) for needs in every],
    }
    enough = [text for text, other in changes.items() if any(_refuses(some, other) is None for some in BACKENDS)]
    return f"no back end can compute this model's attention ({reasons}); set {' or '.join(enough)}"
