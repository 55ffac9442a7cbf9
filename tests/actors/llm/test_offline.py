"""`LLM`: vLLM's names, from a script and from inside a running event loop."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import troupellm
from troupellm import LLM, SamplingParams


@pytest.fixture
def make_llm(model_folder: Path, fake_worker: Any) -> Callable[..., LLM]:
    def make(**settings: Any) -> LLM:
        return LLM(model_folder, worker=lambda folder: fake_worker, **settings)

    return make


def test_generate_answers_in_the_order_of_the_prompts(make_llm: Any, expected: Any) -> None:
    with make_llm() as llm:
        prompts = [{"prompt_token_ids": [30 + index]} for index in range(5)]
        params = [SamplingParams(max_tokens=3 + index) for index in range(5)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for index, output in enumerate(outputs):
            assert output.prompt_token_ids == [30 + index]
            assert output.outputs[0].token_ids == expected([30 + index], 3 + index)
            assert output.outputs[0].finish_reason == "length"
            assert output.finished


def test_one_text_or_one_conversation_is_enough(make_llm: Any) -> None:
    with make_llm() as llm:
        (output,) = llm.generate("hello", SamplingParams(max_tokens=2, n=2))
        assert output.prompt == "hello"
        assert [choice.index for choice in output.outputs] == [0, 1]
        (reply,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=2), use_tqdm=False)
        assert llm.get_tokenizer().decode(reply.prompt_token_ids) == "user:hi;"
        assert llm.get_default_sampling_params() == SamplingParams()
        with pytest.raises(troupellm.InvalidRequest):
            llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)
        with pytest.raises(troupellm.ContextLengthExceeded):
            llm.generate([[5] * 5000], use_tqdm=False)


def test_closing_ends_its_thread(make_llm: Any) -> None:
    before = threading.active_count()
    llm = make_llm()
    assert threading.active_count() > before
    llm.generate(["x"], SamplingParams(max_tokens=1))
    llm.close()
    llm.close()
    assert threading.active_count() == before


def test_dropping_it_frees_the_engine(make_llm: Any, fake_worker: Any) -> None:
    before = threading.active_count()
    llm = make_llm()
    llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)
    del llm
    assert fake_worker.closed
    assert threading.active_count() == before


def test_a_closed_one_says_so_before_it_shows_progress(make_llm: Any, capfd: pytest.CaptureFixture[str]) -> None:
    llm = make_llm()
    llm.close()
    with pytest.raises(troupellm.EngineStopped):
        llm.generate("x")
    assert capfd.readouterr().err == ""


def test_an_interrupt_ends_the_work(make_llm: Any, fake_worker: Any, request: pytest.FixtureRequest) -> None:
    fake_worker.gate = threading.Event()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with make_llm() as llm:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6]] * 3, SamplingParams(max_tokens=400), use_tqdm=False)
        fake_worker.gate.set()
        assert len(llm.generate([[5]], SamplingParams(max_tokens=2), use_tqdm=False)) == 1
        assert llm.engine.snapshot().open_requests == 0


def test_an_interrupt_ends_the_loading(make_llm: Any, fake_worker: Any, request: pytest.FixtureRequest) -> None:
    interrupted = threading.Event()

    def handler(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def load() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted.wait(30)

    before = signal.signal(signal.SIGINT, handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    fake_worker.on_load = load
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        make_llm()
    assert fake_worker.closed
    assert threading.active_count() == threads


def test_a_failed_start_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(troupellm.ModelLoadError):
        LLM(tmp_path / "nothing")
    with pytest.raises(troupellm.TroupeError, match="unknown setting"):
        LLM(tmp_path, no_such_setting=1)
    assert threading.active_count() == before


def test_cached_tokens_are_counted_until_the_cache_is_reset(make_llm: Any) -> None:
    with make_llm() as llm:
        prompt = {"prompt_token_ids": list(range(10, 50))}
        params = SamplingParams(max_tokens=2, temperature=0.0)

        def cached() -> int:
            return llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens

        assert [cached(), cached()] == [0, 39]
        assert llm.reset_prefix_cache() is True
        assert llm.sleep(level=2).level == 2
        assert llm.wake_up(tags=["weights"]).level == 2
        assert llm.wake_up().level is None
        assert len(llm.generate([[5]], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids) == 2
        assert [cached(), cached()] == [0, 39]
    with pytest.raises(troupellm.EngineStopped):
        llm.reset_prefix_cache()


def test_usage_says_what_came_of_drafts(make_llm: Any) -> None:
    with make_llm() as llm:
        told = llm.generate([[5, 6]], SamplingParams(max_tokens=3), use_tqdm=False)[0].usage
        assert (told.prompt_tokens, told.completion_tokens, told.draft_tokens) == (2, 3, 0)


@pytest.mark.anyio
async def test_llm_generates_inside_a_running_event_loop(make_llm: Any) -> None:
    with make_llm() as llm:
        assert len(llm.generate("x", SamplingParams(max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_a_script_that_never_closes_it_ends(model_folder: Path) -> None:
    script = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("fake", {str(Path(__file__).parents[1].joinpath("conftest.py"))!r})
fake = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fake)
import troupellm
llm = troupellm.LLM({str(model_folder)!r}, worker=lambda folder: fake.FakeWorker())
print(len(llm.generate("x", troupellm.SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "3\n"
    assert done.stderr == ""
