"""Verifying finds every damaged byte, and names the tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotswap import ModelId
from hotswap.backends.stores.convert import convert
from hotswap.commands import store as verifying
from hotswap.commands.store import verify
from hotswap.errors import ShardCorrupt

M = ModelId("tiny")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """A model for two ranks, in files so small that tensors go across several."""
    directory = tmp_path_factory.mktemp("store")
    convert(checkpoint, directory, model_id=M, world_size=2, max_file_bytes=4096)
    return directory


def test_a_sound_model_passes(root: Path) -> None:
    seen: list[tuple[int, int]] = []
    manifest = verify(root, M, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (manifest.weight_bytes, manifest.weight_bytes)
    assert {tensor.rank for tensor in manifest.tensors} == {0, 1}


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), piece_bytes=st.sampled_from([4096, 8192, 1 << 20]))
def test_a_flipped_bit_names_its_tensor(root: Path, data: st.DataObject, piece_bytes: int) -> None:
    manifest = verify(root, M)
    shard = data.draw(st.sampled_from(manifest.shards))
    at = data.draw(st.integers(0, shard.size_bytes - 1))
    place = shard.buffer_offset_bytes + at
    names = [
        tensor.name
        for tensor in manifest.tensors_of(shard.rank)
        if tensor.offset_bytes <= place < tensor.offset_bytes + tensor.size_bytes
    ]
    path = root / M / shard.file
    sound = path.read_bytes()
    path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verifying, "_PIECE_BYTES", piece_bytes)
            with pytest.raises(ShardCorrupt, match=shard.file) as caught:
                verify(root, M)
    finally:
        path.write_bytes(sound)
    assert (names[0] if names else "padding") in str(caught.value)
