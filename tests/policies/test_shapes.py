"""Sizes of adapters and KV caches, from real shapes."""

import json

import pytest

from hotswap import ModelId
from hotswap.abc import Manifest
from hotswap.errors import ConfigError
from hotswap.policies.planning import ModelShape

LLAMA_70B = ModelShape(hidden_size=8192, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128)


def manifest(**config: object) -> Manifest:
    return Manifest(model=ModelId("m"), shards=(), buffer_bytes=0, config=json.dumps(config))


def test_an_adapter_is_as_large_as_its_two_matrices() -> None:
    """Counted weight by weight for each projection of a layer that shares no two sizes."""
    shape = ModelShape(hidden_size=5, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=7)
    a_and_b = {"q": (2 * 5, 28 * 2), "k": (2 * 5, 14 * 2), "v": (2 * 5, 14 * 2), "o": (2 * 28, 5 * 2)}
    for target, (a, b) in a_and_b.items():
        assert shape.adapter_bytes(2, targets=(target,), bytes_per_weight=4) == 3 * (a + b) * 4
    assert shape.adapter_bytes(2, bytes_per_weight=4) == 3 * 4 * sum(a + b for a, b in a_and_b.values())


def test_heads_that_share_keys_make_smaller_adapters_and_caches() -> None:
    """Llama 70B at rank 64 in 16 bits: 0.67 GB if all four projections were square, as the post counts; they
    are not, and it is 0.52 GB.
    """
    square = ModelShape(hidden_size=8192, num_layers=80, num_heads=64, num_kv_heads=64, head_dim=128)
    assert square.adapter_bytes(64) == pytest.approx(0.67e9, rel=0.01)
    assert LLAMA_70B.adapter_bytes(64) == pytest.approx(0.52e9, rel=0.01)
    assert square.kv_bytes_per_token() == 8 * LLAMA_70B.kv_bytes_per_token() == 8 * 327_680


def test_a_shape_is_read_from_a_config() -> None:
    config = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64}
    assert ModelShape.of(manifest(**config, num_key_value_heads=8)) == LLAMA_70B
    assert ModelShape.of(manifest(**config)).num_kv_heads == 64
    assert ModelShape.of(manifest(**config, head_dim=256)).head_dim == 256


@pytest.mark.parametrize("config", ["", "[]", '{"hidden_size": 8}', '{"hidden_size": "8"}'])
def test_a_config_without_a_shape_is_refused(config: str) -> None:
    with pytest.raises(ConfigError, match="ModelShape by hand"):
        ModelShape.of(Manifest(model=ModelId("m"), shards=(), buffer_bytes=0, config=config))


def test_senseless_sizes_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^num_layers is "):
        ModelShape(hidden_size=8, num_layers=0, num_heads=1, num_kv_heads=1, head_dim=8)
    with pytest.raises(ConfigError, match=r"^rank is "):
        LLAMA_70B.adapter_bytes(0)
    with pytest.raises(ConfigError, match=r"^targets name 'gate'"):
        LLAMA_70B.adapter_bytes(8, targets=("q", "gate"))
