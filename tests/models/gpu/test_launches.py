"""The number of operations that a decode step launches on a GPU. Each costs a microsecond or two, so the numbers here
may fall but not rise."""

import msgspec
import pytest
import torch

from troupellm.kernels.sampling.noise import token_codes
from troupellm.models.config.decoder_config import DecoderConfig
from troupellm.models.gpu.batch import triton_planner
from troupellm.models.gpu.graph_dispatch import GraphKey
from troupellm.models.gpu.sampling_tensors import CUT, DRAWN, WIDTH, choose
from troupellm.models.layers.aux_hidden_states import AuxHiddenStates
from troupellm.tests.support.gpu.absent_gpu import BLOCK_SIZE, LENGTH, META, PLAIN, ROWS, VARIED, VOCAB, absent, numbers
from troupellm.tests.support.gpu.launches import launches

QWEN3 = msgspec.structs.replace(PLAIN, qk_norm="head")
GREEDY, DRAWING, CUTTING = GraphKey(ROWS), GraphKey(ROWS, kind=DRAWN), GraphKey(ROWS, kind=CUT)
VERIFYING = GraphKey(1, queries=ROWS)
TAPS = AuxHiddenStates(last=True)


def launched(config: DecoderConfig, pairs: int, key: GraphKey) -> list[str]:
    """Of a model of so many pairs of layers."""
    config = msgspec.structs.replace(config, layers=config.layers * pairs)
    with launches() as names:
        plan = triton_planner(config, BLOCK_SIZE, torch.bfloat16, invariant=False)
        gpu, columns = absent(config, plan, TAPS), numbers(WIDTH, key.requests)
        assert gpu.decoder.angle_table is not None  # which is made once
        names.clear()
        if key.queries > 1:
            gpu.graphs.verified(key, columns, TAPS)
        else:
            gpu.graphs.decode(key, columns)
        return list(names)


@pytest.mark.parametrize(
    ("config", "key", "a_pair", "outside"),
    [
        pytest.param(PLAIN, GREEDY, 20, 8, id="llama"),
        pytest.param(QWEN3, GREEDY, 20, 8, id="qwen3"),
        pytest.param(QWEN3, DRAWING, 20, 9, id="qwen3-draws"),
        pytest.param(QWEN3, CUTTING, 20, 10, id="qwen3-cuts-off"),
        pytest.param(QWEN3, VERIFYING, 20, 8, id="qwen3-verifies"),
        pytest.param(VARIED, DRAWING, 20, 14, id="varied-draws"),
    ],
)
def test_a_step_launches_a_known_number_of_kernels(
    config: DecoderConfig, key: GraphKey, a_pair: int, outside: int
) -> None:
    small, large = launched(config, 1, key), launched(config, 2, key)
    assert (len(large) - len(small), 2 * len(small) - len(large)) == (a_pair, outside), small


def test_choosing_of_rows_that_are_cut_off() -> None:
    logits, texts = torch.zeros(ROWS, VOCAB, device=META), numbers(ROWS, LENGTH, dtype=torch.int32)
    columns, codes = numbers(WIDTH, ROWS), token_codes(VOCAB, META)
    with launches() as names:
        choose(logits, columns, codes, CUT, texts)
    assert names == ["peaks_kernel", "survey_kernel", "gather_kernel", "settle_kernel"]
