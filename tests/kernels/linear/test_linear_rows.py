"""Products come in few sizes, since the library keeps half a mebibyte for every size that it meets."""

import os
import subprocess
import sys

from troupellm.kernels.common.onednn import padded_rows


def test_few_sizes_and_little_waste():
    sizes = {rows: padded_rows(rows) for rows in range(1, 2049)}
    assert all(size >= rows for rows, size in sizes.items())
    assert len(set(sizes.values())) <= 64
    assert all(size < rows * 1.13 for rows, size in sizes.items() if rows > 28)
    assert all(size - rows < 4 for rows, size in sizes.items() if rows <= 64)
    assert [padded_rows(rows) for rows in (1, 4, 5, 256, 257, 2048)] == [4, 4, 8, 256, 288, 2048]


PACKED_BY_OTHER_THREADS = """
import os
import subprocess
import sys

import torch
from troupellm.kernels.linear import linear, pack
worst = 0.0
for out, depth in ((288, 768), (192, 576)):
    weight, x = torch.randn(out, depth), torch.randn(3, depth)
    for threads in (1, 4, 2, 8, 1):
        torch.set_num_threads(threads)
        worst = max(worst, float((linear(x, pack(weight)) - x @ weight.T).abs().max()))
assert worst < 1e-2, worst
"""


def test_a_weight_may_be_packed_by_any_number_of_threads() -> None:
    """With AVX2 oneDNN lays weights out by it, too."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    subprocess.run([sys.executable, "-c", PACKED_BY_OTHER_THREADS], env=environment, check=True, timeout=120)
