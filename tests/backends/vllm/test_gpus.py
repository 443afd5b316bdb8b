"""What an engine gives vLLM on GPUs, which are stood in for, and vLLM's second model runner, interpreted."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hotswap.backends.vllm import settings
from hotswap.backends.vllm.settings import Settings
from hotswap.errors import ConfigError

_CARD_BYTES = 80 << 30


class Cards:
    """Eight equal GPUs, as vLLM's platform describes them."""

    device_type = "cuda"

    @staticmethod
    def is_cpu() -> bool:
        return False

    @staticmethod
    def get_device_total_memory(device_id: int = 0) -> int:
        assert device_id in range(8)
        return _CARD_BYTES


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("vllm.platforms"), "_current_platform", Cards)
    settings._device_bytes.cache_clear()


def arguments_of(given: Settings) -> dict[str, Any]:
    return given.vllm_arguments(Path("model"), Path("index"), on_cpu=False, has_tokenizer=False)


@pytest.mark.usefixtures("cards")
def test_two_engines_share_a_card_by_their_memory() -> None:
    """vLLM starts where the part of the card that it is told is free, which is nine tenths by default."""
    one, other = (Settings(device="cuda:3", memory_bytes=size) for size in ("30 GiB", "40 GiB"))
    assert arguments_of(one)["device_ids"] == arguments_of(other)["device_ids"] == [3]
    shares = [arguments_of(each)["gpu_memory_utilization"] for each in (one, other)]
    assert shares == [30 / 80, 40 / 80]


@pytest.mark.usefixtures("cards")
def test_ranks_have_consecutive_cards_and_the_memory_of_all() -> None:
    given = Settings(device="cuda:2", tp=2, pp=2)
    assert arguments_of(given)["device_ids"] == [2, 3, 4, 5]
    assert "gpu_memory_utilization" not in arguments_of(given)
    assert given.total_bytes == 4 * int(_CARD_BYTES * 0.92)
    part = Settings(tp=2, memory_bytes="80 GiB")
    assert arguments_of(part)["gpu_memory_utilization"] == 0.5
    assert "device_ids" not in arguments_of(part), "the first ones are vLLM's own choice"


def test_a_device_that_is_no_gpu_is_refused() -> None:
    for device in ("gpu", "cuda:x", "cpu", "1"):
        with pytest.raises(ConfigError, match="device is"):
            Settings(device=device)


@pytest.mark.parametrize("has_triton", [True, False])
def test_the_first_runner_is_chosen_and_said_to_be_where_vllm_would_take_the_second(
    has_triton: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", has_triton)
    monkeypatch.setenv(_RUNNER, "kept until the test ends")
    monkeypatch.delenv(_RUNNER)
    for _ in range(2):
        settings.choose_runner()
    assert os.environ[_RUNNER] == "0"
    assert [_RUNNER in record.getMessage() for record in caplog.records] == [True] * has_triton


def test_a_runner_that_the_environment_names_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(_RUNNER, "1")
    settings.choose_runner()
    assert os.environ[_RUNNER] == "1"
    assert not caplog.records


_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_SECOND_RUNNER = """
    import types
    import triton.backends

    class Driver:
        @staticmethod
        def is_active():
            return True

    # vLLM for CPUs takes its second runner where Triton has a backend for them; here the interpreter is one.
    triton.backends.backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)

    import anyio
    from dataclasses import replace
    from hotswap import InvalidRequest, ModelId, Request, RequestId, Sampling
    from tests.backends.vllm.support import make_engine, make_store

    async def tokens(engine, request):
        async with engine.stream(request) as stream:
            return [token.id for token in await stream.collect()]

    async def main():
        store = make_store()
        async with make_engine(start="fork") as engine:
            await engine.load(store.card("a"), store)
            print("trial:", engine.resumes_exactly, engine.moves_blocks, engine._core.has_rules)
            sampling = Sampling(max_tokens=8, ignore_eos=True, presence_penalty=1.5, repetition_penalty=1.2)
            request = Request(id=RequestId("r"), model=ModelId("a"), prompt=(5, 6, 7), sampling=sampling)
            whole = await tokens(engine, request)
            rest = await tokens(engine, request.continued(whole[:4]))
            print("tokens:", whole == whole[:4] + rest, len(whole))
            many = {"bad_words_ids": [(1 + n, 2) for n in range(129)], "min_tokens": 2}
            for name, value in many.items():
                sampling = Sampling(max_tokens=8, ignore_eos=True, **{name: value})
                try:
                    await tokens(engine, replace(request, sampling=sampling))
                except InvalidRequest as exc:
                    print("refused:", f"asks for {name}" in str(exc))
            print("tokens:", whole == await tokens(engine, request), len(whole))

    if __name__ == "__main__":
        anyio.run(main)
"""


@pytest.mark.slow
def test_requests_resume_and_move_in_the_second_runner_and_rules_are_refused_there(tmp_path: Path) -> None:
    script = tmp_path / "second.py"
    script.write_text(textwrap.dedent(_SECOND_RUNNER))
    run = subprocess.run(
        [sys.executable, str(script)],
        env={
            **os.environ,
            "PYTHONPATH": os.getcwd(),
            "TRITON_INTERPRET": "1",
            _RUNNER: "1",
        },
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    told = [line for line in run.stdout.splitlines() if line.startswith(("trial:", "tokens:", "refused:"))]
    exact, refused = "tokens: True 8", "refused: True"
    assert told == ["trial: True True False", exact, refused, refused, exact], run.stderr
    assert "does not sample by hotswap's rules" in run.stderr
