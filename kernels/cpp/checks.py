"""Checks the arguments of compiled functions, which read and write by addresses and trust sizes, types and strides."""

from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FLOAT = torch.float32


class RefusedCall(ValueError):
    """A compiled function was given something that it would leave its memory with. Nothing was computed."""


def rows_of(name: str, x: Tensor, width: int) -> tuple[int, int]:
    """The number of rows of float32 [rows, width] on a CPU, and how many numbers each is from the next one.

    Raises:
        RefusedCall: the tensor is something else, or the numbers of a row do not lie side by side.
    """
    if x.dtype is FLOAT and x.is_cpu and x.dim() == 2:
        (rows, size), (apart, step) = x.shape, x.stride()
        if size == width and (step == 1 or size == 1):
            return rows, apart
    refuse(name, x, FLOAT, ("rows", width), "rows")


def check_rows(name: str, x: Tensor, rows: int, width: int) -> int:
    """How many numbers each row of float32 [rows, width] on a CPU is from the next one; rows do not overlap.

    Raises:
        RefusedCall: the tensor is something else.
    """
    found, apart = rows_of(name, x, width)
    if found != rows or (rows > 1 and apart < width):
        refuse(name, x, FLOAT, (rows, width), "rows")
    return apart


def check(name: str, x: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """That a tensor has this type and shape and is contiguous, on a CPU.

    Raises:
        RefusedCall: it does not.
    """
    if x.dtype is not dtype or x.shape != shape or not x.is_contiguous() or not x.is_cpu:
        refuse(name, x, dtype, shape, "memory")


def address_of_norm(norm: Tensor, width: int) -> int:
    """Of a norm's gains, float32 [width], contiguous.

    Raises:
        RefusedCall: the tensor is something else.
    """
    check("norm", norm, FLOAT, width)
    return norm.data_ptr()


def check_array(name: str, x: NDArray[np.generic], dtype: type[np.generic], *shape: int) -> None:
    """The same of an array of numpy.

    Raises:
        RefusedCall: it is something else.
    """
    if x.dtype != dtype or x.shape != shape or not x.flags.c_contiguous:
        wanted = f"{np.dtype(dtype)} {list(shape)}"
        raise RefusedCall(f"{name} must be {wanted} in contiguous memory, not {x.dtype} {list(x.shape)}")


def require(condition: bool, text: str) -> None:
    """
    Raises:
        RefusedCall: the condition does not hold.
    """
    if not condition:
        raise RefusedCall(text)


def refuse(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int | str, ...], contiguous: str) -> NoReturn:
    """
    Raises:
        RefusedCall: always.
    """
    wanted = f"{dtype} [{', '.join(map(str, shape))}] on the CPU with contiguous {contiguous}"
    found = f"{x.dtype} {list(x.shape)} with strides {list(x.stride())} on {x.device}"
    raise RefusedCall(f"{name} must be {wanted}, not {found}")
