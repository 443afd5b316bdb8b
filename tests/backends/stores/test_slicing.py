"""Tensor-parallel parts: what transformers gives each rank, and together the whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.distributed.sharding_utils import DtensorShardOperation
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.initialization import no_tie_weights

from hotswap.abc import Manifest
from hotswap.backends.stores import streaming
from hotswap.backends.stores.convert import convert
from hotswap.backends.stores.slicing import Cut, cuts
from hotswap.backends.torch import weights
from hotswap.errors import ConfigError, UnsupportedModel
from tests.backends.torch.zoo import CONFIGS, make_model

# Not in it: those without a plan for their layers (gpt2, opt, gpt_oss).
PLANNED = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi", "phi3", "gpt_neox"]
PLANNED += ["mixtral", "qwen3_moe", "deepseek_v3"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("zoo")
    for name in CONFIGS:
        make_model(name).save_pretrained(root / name)
    return root


def parts(root: Path, manifest: Manifest) -> list[dict[str, torch.Tensor]]:
    """What each rank has, read from its data files."""
    ranks: list[dict[str, torch.Tensor]] = []
    for rank in range(manifest.world_size):
        data = b"".join((root / manifest.model / s.file).read_bytes() for s in manifest.shards_of(rank))
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        ranks.append({spec.name: weights.tensor_at(flat, spec) for spec in manifest.tensors_of(rank)})
    return ranks


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[Any]:
    """A device mesh as this rank sees it, of processes that are not there."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def sharded_by_transformers(
    config: Any, whole: dict[str, torch.Tensor], rank: int, world_size: int
) -> dict[str, torch.Tensor]:
    """The rank's part of every tensor, cut by transformers' own sharding while it loads."""
    with torch.device("meta"), no_tie_weights():  # they are tied once they are loaded
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with rank_of(rank, world_size) as mesh:
        apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(dict(model.tp_plan)))
        state = model.state_dict()
        return {
            name: DtensorShardOperation(state[name]).shard_tensor(tensor)
            if isinstance(state[name], DTensor)
            else tensor
            for name, tensor in whole.items()
        }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLANNED)
def test_each_rank_has_what_transformers_gives_it(tmp_path: Path, checkpoints: Path, name: str) -> None:
    manifest = convert(checkpoints / name, tmp_path, model_id="m", world_size=2, max_file_bytes=100_000)
    (whole,) = parts(tmp_path, convert(checkpoints / name, tmp_path, model_id="whole"))
    for rank, mine in enumerate(parts(tmp_path, manifest)):
        theirs = sharded_by_transformers(CONFIGS[name](), whole, rank, 2)
        assert mine.keys() == theirs.keys()
        for tensor in mine:
            assert torch.equal(mine[tensor], theirs[tensor]), (rank, tensor)


@pytest.mark.parametrize("name", PLANNED)
def test_the_parts_make_the_whole(
    tmp_path: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(streaming, "_PIECE_BYTES", 3000)
    (whole,) = parts(tmp_path, convert(checkpoints / name, tmp_path, model_id="whole"))
    ranks = parts(tmp_path, convert(checkpoints / name, tmp_path, model_id="m", world_size=2))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    found = cuts(model, {tensor: tuple(value.shape) for tensor, value in whole.items()}, 2)
    assert found
    for tensor, value in whole.items():
        mine = [rank[tensor] for rank in ranks]
        if tensor not in found:
            assert all(torch.equal(part, value) for part in mine), tensor
        else:
            assert torch.equal(joined(mine, found[tensor]), value), tensor


def joined(mine: list[torch.Tensor], cut: Cut) -> torch.Tensor:
    """The whole of parts: group by group, in each of them rank by rank."""
    groups = [part.chunk(cut.groups, cut.dim) for part in mine]
    return torch.cat([group[index] for index in range(cut.groups) for group in groups], cut.dim)


REAL_PROPORTIONS: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


@pytest.mark.parametrize(
    ("config", "replicated"),
    [
        (transformers.LlamaConfig(**REAL_PROPORTIONS), "norm"),
        (transformers.Qwen3Config(**REAL_PROPORTIONS), "norm"),
        (transformers.MixtralConfig(**REAL_PROPORTIONS, num_local_experts=4), "norm|mlp.gate"),
    ],
    ids=["llama", "qwen3", "mixtral"],
)
def test_four_ranks_together_hold_the_checkpoint_and_what_is_replicated_by_design(
    tmp_path: Path, config: Any, replicated: str
) -> None:
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "c")
    manifest = convert(tmp_path / "c", tmp_path, model_id="m", world_size=4, dtype="bfloat16")
    single = convert(tmp_path / "c", tmp_path, model_id="whole", dtype="bfloat16")
    sizes = {spec.name: spec.size_bytes for spec in single.tensors}
    whole_on_each = {spec.name for spec in manifest.tensors_of(0) if spec.size_bytes == sizes[spec.name]}
    assert all(any(kind in name for kind in replicated.split("|")) for name in whole_on_each)
    by_design = 3 * sum(sizes[name] for name in whole_on_each)
    checkpoint_bytes = sum(sizes.values())
    assert by_design < 0.005 * checkpoint_bytes
    assert manifest.weight_bytes <= 1.02 * checkpoint_bytes + by_design
    assert {manifest.buffer_bytes} == {sum(s.size_bytes for s in manifest.shards_of(r)) for r in range(4)}


@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_oss"])
def test_a_model_without_a_plan_is_refused(tmp_path: Path, checkpoints: Path, name: str) -> None:
    with pytest.raises(UnsupportedModel, match="no tensor-parallel plan"):
        convert(checkpoints / name, tmp_path / "root", model_id="m", world_size=2)
    assert not (tmp_path / "root").exists()


def test_heads_are_never_cut_through(tmp_path: Path, checkpoints: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"2 heads .*num_key_value_heads.*divides 2"):
        convert(checkpoints / "llama", tmp_path / "root", model_id="m", world_size=4)


@pytest.mark.parametrize("world_size", [0, -1])
def test_no_ranks_are_refused(tmp_path: Path, checkpoints: Path, world_size: int) -> None:
    with pytest.raises(ConfigError, match="world_size"):
        convert(checkpoints / "llama", tmp_path / "root", model_id="m", world_size=world_size)


def test_a_style_that_is_unknown_is_refused(
    tmp_path: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"layers.*.mlp.up_proj": "diagonal"}
    monkeypatch.setattr(transformers.LlamaConfig, "base_model_tp_plan", plan)
    with pytest.raises(UnsupportedModel, match=r"up_proj.*'diagonal'"):
        convert(checkpoints / "llama", tmp_path / "root", model_id="m", world_size=2)


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    world_size=st.integers(1, 5),
    groups=st.sampled_from([1, 2]),
    rows=st.integers(1, 5),
    data=st.data(),
)
def test_pieces_of_a_part_make_the_part(
    shape: list[int], world_size: int, groups: int, rows: int, data: st.DataObject
) -> None:
    cut = Cut(data.draw(st.integers(0, len(shape) - 1)), groups)
    whole = torch.arange(math.prod(shape)).view(shape)
    every: list[int] = []
    for rank in range(world_size):
        expected = cut.part(whole, 0, tuple(shape), rank, world_size)
        assert tuple(expected.shape) == cut.shape(tuple(shape), rank, world_size)
        starts = range(0, shape[0], rows)
        pieces = [cut.part(whole[a : a + rows], a, tuple(shape), rank, world_size) for a in starts]
        assert torch.equal(torch.cat(pieces), expected)
        every += expected.flatten().tolist()
    assert sorted(every) == list(range(math.prod(shape))), "the ranks do not have each element once"
