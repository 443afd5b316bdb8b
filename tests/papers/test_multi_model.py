"""The multi-model serving post: its cost model, its switch times and the memory of overlapped switches."""

import pytest

from hotswap import ModelId
from hotswap.abc import ModelCard
from hotswap.policies.planning import ModelShape, SharedModel, SharingAdvisor, SharingMethod
from hotswap.policies.planning.sharing import overlapped_switch_s, switch_penalty_usd_per_h

GB = 10**9


def llama_70b(name: str) -> SharedModel:
    card = ModelCard(
        id=ModelId(name), weight_bytes=140 * GB, max_context_tokens=8192, kv_bytes_per_token=327_680
    )
    return SharedModel(card=card, requests_per_s=0.01, tokens_in=500, tokens_out=200)


@pytest.mark.parametrize(("switch_s", "usd"), [(2.5, 2.25), (0.015, 0.0135), (23.0, 20.7)])
def test_what_a_hundred_switches_an_hour_cost(switch_s: float, usd: float) -> None:
    """100 switches an hour, 3000 tokens/s, 0.003 USD for 1000 tokens: warm, adapters, cold."""
    cost = switch_penalty_usd_per_h(100, switch_s, tokens_per_s=3000, usd_per_token=0.003 / 1000)
    assert cost == pytest.approx(usd)


def test_an_overlapped_switch_is_its_initialisation_once_the_lead_is_long_enough() -> None:
    assert overlapped_switch_s(2.5, lead_s=2.5, init_s=0.2) == 0.2
    assert overlapped_switch_s(2.5, lead_s=9.0, init_s=0.2) == 0.2
    assert overlapped_switch_s(2.5, lead_s=1.0, init_s=0.2) == pytest.approx(1.7)


def test_the_switch_times_of_a_70b_model() -> None:
    """Cold 23 s, warm 2.5 s, overlapped 200 ms: 140 GB over 7 GB/s and 55 GB/s."""
    advisor = SharingAdvisor(memory_bytes=320 * GB, host_bytes=500 * GB, num_devices=4)
    report = advisor.advise([llama_70b("a"), llama_70b("b")])
    assert report.method(SharingMethod.COLD).switch_s == pytest.approx(23, rel=0.02)
    assert report.method(SharingMethod.WARM).switch_s == pytest.approx(2.5 + 0.2, rel=0.02)
    assert report.method(SharingMethod.OVERLAPPED).switch_s == 0.2


def test_overlapped_switches_of_a_70b_model_need_four_devices() -> None:
    """280 GB for weights alone: 70 of the 80 GB of each of four devices, more than three have."""
    models = [llama_70b("a"), llama_70b("b")]
    obstacles = {
        num_devices: SharingAdvisor(
            memory_bytes=num_devices * 80 * GB, host_bytes=500 * GB, num_devices=num_devices
        )
        .advise(models)
        .method(SharingMethod.OVERLAPPED)
        .obstacle
        for num_devices in (2, 3, 4)
    }
    assert [num_devices for num_devices, obstacle in obstacles.items() if not obstacle] == [4]


def test_a_hundred_adapters_take_less_than_a_copy_of_the_base() -> None:
    """The post: 67 GB for a hundred, 0.48 % of the base each; with the real shapes 52 GB and 0.37 %."""
    shape = ModelShape(hidden_size=8192, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128)
    assert 100 * shape.adapter_bytes(64) == pytest.approx(52.4 * GB, rel=0.01)
    assert shape.adapter_bytes(64) / (140 * GB) < 0.0048
