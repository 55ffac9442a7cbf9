"""The calls to CUDA for the host tier's memory, seen without one."""

from types import SimpleNamespace

import pytest
import torch

from troupellm.models.kv_offload import pinning
from troupellm.models.kv_offload.host_memory import HostBuffer
from troupellm.protocol.errors import ConfigError


class Recorded:
    """A CUDA that pins, answers as told, and keeps the error of a failed call for the next launch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pinned: dict[int, int] = {}
        """Bytes by address."""
        self.code = self.kept = 0
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self.runtime)
        self.runtime = SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister)
        empty = torch.empty
        there = SimpleNamespace(fill_=self.launch)
        monkeypatch.setattr(
            torch, "empty", lambda *size, **more: there if more.get("device") == "cuda" else empty(*size, **more)
        )

    def register(self, address: int, size: int, flags: int) -> int:
        assert flags == 1
        if not self.code:
            self.pinned[address] = size
        return self.answer()

    def unregister(self, address: int) -> int:
        if not self.code:
            del self.pinned[address]
        return self.answer()

    def answer(self) -> int:
        self.kept = self.code or self.kept
        return self.code

    def launch(self, _: float) -> None:
        kept, self.kept = self.kept, 0
        if kept:
            raise RuntimeError(f"CUDA error {kept}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.setattr(pinning, "_STUCK", [])
    return Recorded(monkeypatch)


def test_exactly_what_is_asked_for_is_pinned_until_it_is_given_back(cuda: Recorded) -> None:
    host_buffer = HostBuffer(3, 100, pinned=True)
    assert cuda.pinned == {host_buffer.tensor(0).data_ptr(): 300}
    host_buffer[1][:] = 7
    host_buffer.release()
    assert not cuda.pinned
    host_buffer.release()
    host_buffer.reserve()
    assert cuda.pinned == {host_buffer.tensor(0).data_ptr(): 300}
    del host_buffer  # as an owner that cannot use it does
    assert not cuda.pinned


def test_a_processor_pins_nothing(cuda: Recorded) -> None:
    HostBuffer(3, 100).release()
    assert not cuda.pinned


def test_memory_that_cannot_be_pinned_is_refused(cuda: Recorded) -> None:
    cuda.code = 2
    with pytest.raises(ConfigError, match=r"300 bytes of memory cannot be pinned \(CUDA error 2\)") as caught:
        HostBuffer(3, 100, pinned=True)
    assert caught.value.param == "kv_offloading_size"
    assert not cuda.pinned
    cuda.launch(1.0)  # does not fail


def test_memory_that_stays_pinned_goes_to_nobody_else(cuda: Recorded, caplog: pytest.LogCaptureFixture) -> None:
    host_buffer = HostBuffer(3, 100, pinned=True)
    cuda.code = 700
    host_buffer.release()
    assert [memory.nbytes for memory in pinning._STUCK] == [300]
    assert "300 bytes of memory stay taken" in caplog.text
    cuda.launch(1.0)  # does not fail
