"""The installed vLLM is as hotswap needs it, and what has drifted is said by name."""

from __future__ import annotations

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
