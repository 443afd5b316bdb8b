"""The installed vLLM is as hotswap needs it, and what has drifted is said by name."""

from __future__ import annotations

import os
import sys
import textwrap

import anyio
import pytest

from hotswap.backends.vllm import names


def test_the_installed_vllm_has_all_that_hotswap_relies_on() -> None:
    assert names.drift() == []


@pytest.mark.parametrize(
    ("path", "wanted", "said"),
    [
        ("vllm.v1.engine.async_llm:AsyncLLM.abort", ("request_id", "politely"), "takes no politely"),
        ("vllm.v1.engine.async_llm:AsyncLLM.gone", (), "AsyncLLM.gone is gone"),
        ("vllm.no_such_module:Name", (), "no_such_module"),
    ],
)
def test_what_has_drifted_is_named(
    path: str, wanted: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "RELIED_ON", {**names.RELIED_ON, path: wanted})
    (sentence,) = names.drift()
    assert said in sentence


_WITHOUT_CONNECTORS = """
    import importlib
    from types import SimpleNamespace

    import anyio

    real = importlib.import_module

    def without(name, package=None):
        return SimpleNamespace() if name.endswith("kv_connector.v1.base") else real(name, package)

    importlib.import_module = without

    from hotswap.backends.vllm import names
    from tests.backends.vllm.support import make_engine, make_store
    from tests.backends.vllm.test_resumption import asked

    async def main():
        store = make_store()
        assert any("KVConnectorBase_V1 is gone" in sentence for sentence in names.drift())
        async with make_engine() as engine:
            await engine.load(store.card("a"), store)
            print("moves blocks", engine.moves_blocks, "resumes", engine.resumes_exactly)
            request = asked("seeded and penalised", 0)
            whole = await generate(engine, request)
            rest = await generate(engine, request.continued(whole[:20]))
            print("equal", whole == whole[:20] + rest)

    async def generate(engine, request):
        async with engine.stream(request) as tokens:
            return [token.id for token in await tokens.collect()]

    anyio.run(main)
"""


async def test_where_vllm_has_no_connectors_requests_move_as_tokens() -> None:
    done = await anyio.run_process(
        [sys.executable, "-c", textwrap.dedent(_WITHOUT_CONNECTORS)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        check=False,
    )
    told = done.stdout.decode()
    assert "moves blocks False resumes True" in told, done.stderr.decode()[-2000:]
    assert "equal True" in told
