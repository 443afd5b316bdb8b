"""Sources that cannot be imported: each is refused by a typed error that says why, and nothing is written."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest

from hotswap import Model, ModelId
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.stores.gguf import BLOCKS
from hotswap.backends.stores.partial import check_name
from hotswap.cli import main
from hotswap.commands.store import verify
from hotswap.errors import ConfigError, ShardCorrupt, ShardMissing, UnsafeFile
from hotswap.model import Layout
from tests.backends.stores.checkpoints import gguf_bytes, write_checkpoint, write_safetensors

M = ModelId("m")
TENSORS = {"a.weight": ("BF16", (4, 8)), "b.weight": ("BF16", (4, 8))}
LAYOUTS: tuple[Layout, ...] = ("checkpoint", "modules")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", TENSORS)


def write_index(source: Path, weight_map: dict[str, str]) -> None:
    """Make the weights those of an index, the file that was there its first."""
    (source / "model.safetensors").rename(source / "a.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


# ----------------------------------------------------------------------------------- which weights there are


def test_a_tensor_that_an_index_names_and_its_file_lacks_is_missing(source: Path, tmp_path: Path) -> None:
    write_index(source, dict.fromkeys((*TENSORS, "c.weight"), "a.safetensors"))
    with pytest.raises(ShardMissing, match=r"a\.safetensors' has no tensor 'c\.weight'.*Fetch"):
        convert(source, tmp_path / "root", model_id=M, layout="checkpoint")


def test_of_a_tensor_in_two_files_the_index_says_which_counts(source: Path, tmp_path: Path) -> None:
    write_index(source, {"a.weight": "a.safetensors", "b.weight": "b.safetensors"})
    write_safetensors(source / "b.safetensors", {"b.weight": ("BF16", (2, 8))})
    manifest = convert(source, tmp_path / "root", model_id=M, layout="checkpoint")
    assert {one.name: one.shape for one in manifest.tensors} == {"a.weight": (4, 8), "b.weight": (2, 8)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_that_the_names_of_the_others_tell_of_is_missing(
    layout: Layout, source: Path, tmp_path: Path
) -> None:
    (source / "model.safetensors").rename(source / "model-00002-of-00002.safetensors")
    with pytest.raises(ShardMissing, match="model-00001-of-00002"):
        convert(source, tmp_path / "root", model_id=M, layout=layout)


def test_files_without_a_tensor_are_no_checkpoint(source: Path, tmp_path: Path) -> None:
    write_safetensors(source / "model.safetensors", {})
    with pytest.raises(ShardMissing, match="no tensors"):
        convert(source, tmp_path / "root", model_id=M, layout="checkpoint")


AWQ = {"qweight": "I32", "qzeros": "I32", "scales": "F16"}
FP8 = {"weight": "F8_E4M3", "weight_scale": "BF16"}


@pytest.mark.parametrize(
    ("parts", "lacking"), [(kind, part) for kind in (AWQ, FP8) for part in kind], ids=str
)
def test_a_quantised_module_without_a_part_is_refused(
    parts: dict[str, str], lacking: str, source: Path, tmp_path: Path
) -> None:
    tensors = {
        f"layers.{layer}.q_proj.{part}": (dtype, (2, 8))
        for layer in range(3)
        for part, dtype in parts.items()
    }
    del tensors[f"layers.1.q_proj.{lacking}"]
    write_safetensors(source / "model.safetensors", tensors)
    with pytest.raises(ShardMissing, match=rf"has no tensor 'layers\.1\.q_proj\.{lacking}', though it has"):
        convert(source, tmp_path / "root", model_id=M, layout="checkpoint")


def test_layers_that_are_not_quantised_and_scales_of_activations_may_be_missing(
    source: Path, tmp_path: Path
) -> None:
    tensors = {f"layers.{layer}.q_proj.{part}": (FP8[part], (2, 8)) for layer in (0, 1) for part in FP8}
    tensors |= {"layers.2.q_proj.weight": ("BF16", (2, 8)), "layers.1.q_proj.input_scale": ("F32", (1, 1))}
    write_safetensors(source / "model.safetensors", tensors)
    manifest = convert(source, tmp_path / "root", model_id=M, layout="checkpoint")
    assert {tensor.name for tensor in manifest.tensors} == tensors.keys()


PACKED = {"weight_packed": "I32", "weight_scale": "BF16", "weight_zero_point": "I32"}


def write_groups(source: Path, *symmetric: bool) -> None:
    """Write a model of whose layers the second has no zero points, with a config of so many groups."""
    tensors = {f"layers.{layer}.q_proj.{part}": (PACKED[part], (2, 8)) for layer in (0, 1) for part in PACKED}
    del tensors["layers.1.q_proj.weight_zero_point"]
    groups = {f"group_{at}": {"weights": {"symmetric": each}} for at, each in enumerate(symmetric)}
    write_checkpoint(source, tensors, quantization_config={"config_groups": groups})


@pytest.mark.parametrize("symmetric", [(True,), (False, True)], ids=["all symmetric", "some symmetric"])
def test_symmetric_modules_need_no_zero_points(
    symmetric: tuple[bool, ...], source: Path, tmp_path: Path
) -> None:
    write_groups(source, *symmetric)
    manifest = convert(source, tmp_path / "root", model_id=M, layout="checkpoint")
    assert len(manifest.tensors) == 5


def test_an_asymmetric_module_without_its_zero_points_is_refused(source: Path, tmp_path: Path) -> None:
    write_groups(source, False, False)
    with pytest.raises(ShardMissing, match=r"has no tensor 'layers\.1\.q_proj\.weight_zero_point'"):
        convert(source, tmp_path / "root", model_id=M, layout="checkpoint")


@pytest.mark.parametrize("suffix", ["gguf", "GGUF"])
def test_a_gguf_file_may_have_its_suffix_in_either_case(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"tiny.{suffix}"
    path.write_bytes(gguf_bytes())
    assert convert(path, tmp_path / "root", model_id=M).is_gguf


def test_the_length_of_every_kind_of_tensor_of_gguf_is_known() -> None:
    known = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    del known[gguf.GGMLQuantizationType.Q8_1]  # of activations, and no file has it
    assert {kind: BLOCKS.get(kind) for kind in known} == known


# -------------------------------------------------------------------------------------- what lies in the way


def _make_fifo(path: Path) -> None:
    os.mkfifo(path)


def _make_directory(path: Path) -> None:
    path.mkdir()


def _make_link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def _make_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", [_make_fifo, _make_directory, _make_link_to_nothing, _make_link_to_itself])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_is_no_file_is_never_waited_for(
    name: str, make: Callable[[Path], None], layout: Layout, source: Path, tmp_path: Path
) -> None:
    (source / name).unlink()
    make(source / name)
    with pytest.raises(ShardMissing, match=r"no config\.json|is no file, or a link to nothing"):
        convert(source, tmp_path / "root", model_id=M, layout=layout)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("source/model.safetensors", "it is a file; give the directory"),
        ("root/m", "it is a model of a store"),
        ("https://huggingface.co/org/name", "it is a URL; give a path, or the name"),
        ("nothing/at/all", "nothing of this name"),
        ("~/models/m", "'~' is not the home directory"),
    ],
)
def test_a_source_of_another_kind_is_told_as_what_it_is(
    given: str, why: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    convert(source, "root", model_id=M, layout="checkpoint")
    for layout in LAYOUTS:
        with pytest.raises(ShardMissing, match=why):
            convert(given, "other", model_id=M, layout=layout)


def test_a_pointer_of_git_lfs_is_told_from_a_broken_file(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ShardCorrupt, match="git lfs pull"):
        convert(source, tmp_path / "root", model_id=M, layout="checkpoint")


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        ({"max_position_embeddings": 10**23}, "checkpoint"),
        ({"max_position_embeddings": 10**23}, "modules"),
        ({"eos_token_id": [2, 2**63]}, "checkpoint"),
        ({"eos_token_id": [2, 2**63]}, "modules"),
        ({"num_key_value_heads": 10**20}, "checkpoint"),
    ],
)
def test_a_number_that_no_model_has_is_told_before_a_byte_is_written(
    config: dict[str, object], layout: Layout, checkpoint: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(checkpoint, tmp_path / "source"))
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    with pytest.raises(ShardCorrupt, match="leads to the number"):
        convert(source, tmp_path / "root", model_id=M, layout=layout)
    assert not (tmp_path / "root").exists()


# ---------------------------------------------------------------------------------------------- permissions


@pytest.mark.skipif(os.geteuid() != 0, reason="it becomes another user")
def test_a_source_that_may_not_be_read_is_told(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").write_text("{}")
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o777)
    sources: list[Path] = []
    for hidden in ("config.json", "model.safetensors", "tokenizer.json", "."):
        sources.append(Path(shutil.copytree(source, tmp_path / f"without_{hidden.strip('.')}")))
        (sources[-1] / hidden).chmod(0o000)
    (tmp_path / "tiny.gguf").write_bytes(gguf_bytes())
    (tmp_path / "tiny.gguf").chmod(0o000)
    commands = [
        ["add", str(path), str(root), "--layout", layout] for path in sources for layout in LAYOUTS
    ] + [["add", str(tmp_path / "tiny.gguf"), str(root)]]
    for command, (status, told) in zip(commands, as_another_user(tmp_path, commands), strict=True):
        assert (status, "cannot be read: Permission denied" in told) == (2, True), (command, told)
    assert list(root.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="it becomes another user")
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_store_of_another_user_is_told(mode: int, source: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    convert(source, root, model_id=M, layout="checkpoint")
    root.chmod(mode)
    commands = [
        ["ls", str(root)],
        ["verify", str(root)],
        ["rm", str(root), "m"],
        ["bench", str(root), "m"],
        ["add", str(source), str(root), "--layout", "checkpoint"],
    ]
    for command, (status, told) in zip(commands, as_another_user(tmp_path, commands), strict=True):
        expected = "Permission denied. Run as the user that the store belongs to"
        assert (status, expected in told) == (2, True), (command, told)
    verify(root, M)


def as_another_user(place: Path, commands: list[list[str]]) -> list[tuple[int, str]]:
    """Run `hotswap store` with each list of arguments as a user who may enter `place`, in one process.

    Returns the status of each, and what it has written to standard error.
    """
    for parent in (place, *place.parents[:3]):  # one more of several test processes
        parent.chmod(parent.stat().st_mode | 0o055)
    run = subprocess.run(
        [sys.executable, "-c", _AS_ANOTHER_USER, json.dumps(commands)], capture_output=True, check=True
    )
    return [(status, told) for status, told in json.loads(run.stdout.splitlines()[-1])]


# What it imports may be readable for root alone.
_AS_ANOTHER_USER = """
import anyio._backends._asyncio, contextlib, io, json, os, sys
import hotswap.backends.stores.convert, hotswap.commands.store, hotswap.commands.progress
from hotswap.cli import main
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
outcomes = []
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as told:
        outcomes.append((main(["store", *command]), told.getvalue()))
print(json.dumps(outcomes))
"""


# ---------------------------------------------------------------------------------- where the model would go


@pytest.mark.parametrize("replace", [True, False])
def test_what_is_no_model_of_a_store_is_never_replaced(replace: bool, source: Path, tmp_path: Path) -> None:
    """Also the checkpoint itself, where it lies in the store under the model's name."""
    root = source.parent
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    with pytest.raises(UnsafeFile, match="is no model of a store, so it is not replaced"):
        convert(source, root, model_id="source", layout="checkpoint", replace_existing=replace)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert list(root.iterdir()) == [source]


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("make", [_make_link_to_nothing, _make_link_to_itself])
def test_a_link_of_the_models_name_is_refused_and_stays(
    make: Callable[[Path], None], replace: bool, source: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    make(root / M)
    with pytest.raises(UnsafeFile, match="symbolic link"):
        convert(source, root, model_id=M, layout="checkpoint", replace_existing=replace)
    assert [path.is_symlink() for path in root.iterdir()] == [True]


def test_a_file_of_the_models_name_is_refused_and_stays(source: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / M).write_text("mine")
    with pytest.raises(UnsafeFile, match="is no model of a store"):
        convert(source, root, model_id=M, layout="checkpoint", replace_existing=True)
    assert [path.read_text() for path in root.iterdir()] == ["mine"]


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_cannot_be_the_directory_of_a_store(below: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="is a file, or a link to nothing"):
        convert(source, tmp_path / "file" / below, model_id=M, layout="checkpoint")


@pytest.fixture(params=["index.json", "index.json source.json", "index.json rank-0-of-1.000.bin"])
def damaged(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Path:
    """A store whose model lacks its index, and perhaps another file, as of a copy that was interrupted."""
    (source / "tokenizer.json").write_text("{}")
    convert(source, tmp_path / "root", model_id=M, layout="checkpoint")
    (tmp_path / "root" / M / "source.json").write_text("{}")
    for name in request.param.split():
        (tmp_path / "root" / M / name).unlink()
    return tmp_path / "root"


def test_a_damaged_model_without_its_index_can_be_replaced(source: Path, damaged: Path) -> None:
    convert(source, damaged, model_id=M, layout="checkpoint", replace_existing=True)
    verify(damaged, M)


def files_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


async def test_a_damaged_model_without_its_index_can_be_removed(damaged: Path) -> None:
    async with NvmeStore(damaged) as store:
        await store.remove(M)
        assert files_in(damaged) == {}
        with pytest.raises(ShardMissing):
            await store.remove(M)


async def test_files_of_others_are_not_removed_as_a_model(source: Path) -> None:
    before = files_in(source)
    async with NvmeStore(source.parent) as store:
        with pytest.raises(ShardMissing):
            await store.remove(ModelId(source.name))
    assert files_in(source) == before


def test_a_model_that_is_removed_meanwhile_is_as_one_that_is_not_there(tmp_path: Path) -> None:
    model = tmp_path / M

    def come_and_go() -> None:
        for _ in range(3000):
            model.mkdir()
            model.rmdir()

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(come_and_go)
        while not coming.done():
            check_name(model, replace_existing=True)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"layout": "weird"}, "no layout 'weird'; give one of"), ({"max_file_bytes": 4}, "give 4096 or more")],
)
def test_wrong_options_are_refused(
    options: dict[str, object], why: str, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        convert(source, tmp_path / "root", model_id=M, **options)  # type: ignore[arg-type]


async def test_a_source_that_is_broken_by_the_next_start_is_told(source: Path, tmp_path: Path) -> None:
    model = Model("m", source, layout="checkpoint")
    async with NvmeStore(tmp_path / "root") as store:
        await store.import_model(model)
        (source / "model.safetensors").unlink()
        _make_link_to_itself(source / "model.safetensors")
        with pytest.raises(ShardMissing, match="is no file, or a link to nothing"):
            await store.import_model(model)
        assert (await store.manifest(M)).model == M


@pytest.mark.parametrize("command", ["add", "ls", "verify"])
def test_a_file_that_cannot_be_the_root_is_told_by_the_command(
    command: str, tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    given = [str(source), "--layout", "checkpoint"] if command == "add" else []
    assert main(["store", command, *given[:1], str(tmp_path / "file"), *given[1:]]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


# ------------------------------------------------------------------------------- numbers that are not finite

# By dtype: the bytes of NaN, and of infinity if it has one.
_NOT_FINITE: dict[str, tuple[bytes, bytes]] = {
    "F64": (struct.pack("<d", math.nan), struct.pack("<d", -math.inf)),
    "F32": (struct.pack("<f", math.nan), struct.pack("<f", math.inf)),
    "F16": (struct.pack("<e", math.nan), struct.pack("<e", -math.inf)),
    "BF16": (struct.pack("<f", -math.nan)[2:], struct.pack("<f", math.inf)[2:]),
    "F8_E4M3": (b"\xff", b""),
    "F8_E5M2": (b"\x7e", b"\x7c"),
    "F8_E8M0": (b"\xff", b""),
}
ROWS, COLUMNS, PLACE = 2_200_000, 5, [2_199_998, 3]  # beyond the first piece that is read, in every dtype


def write_one(
    source: Path, dtype: str, number: bytes, name: str, *, is_vector: bool = False, others: bytes = b"\0"
) -> None:
    """Write one tensor with a number near its end; the others repeat some bytes."""
    size = ROWS * COLUMNS * len(number)
    data = bytearray((others * (size // len(others) + 1))[:size])
    at = (PLACE[0] * COLUMNS + PLACE[1]) * len(number)
    data[at : at + len(number)] = number
    shape = [ROWS * COLUMNS] if is_vector else [ROWS, COLUMNS]
    text = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    with (source / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.write(data)


@pytest.mark.parametrize("dtype", _NOT_FINITE)
def test_nan_and_infinite_weights_are_refused_by_name_and_place(
    dtype: str, source: Path, tmp_path: Path
) -> None:
    nan, infinite = _NOT_FINITE[dtype]
    write_one(source, dtype, nan, "scale")
    with pytest.raises(ShardCorrupt, match=rf"'scale'.*is NaN at \[{PLACE[0]}, {PLACE[1]}\]"):
        convert(source, tmp_path / "root", model_id=M, layout="checkpoint")
    if infinite:
        write_one(source, dtype, infinite, "up.weight")
        with pytest.raises(ShardCorrupt, match=rf"'up.weight'.*is infinite at \[{PLACE[0]}, {PLACE[1]}\]"):
            convert(source, tmp_path / "root", model_id=M, layout="checkpoint")
    assert list((tmp_path / "root").iterdir()) == []


@pytest.mark.parametrize("dtype", [dtype for dtype, (_, infinite) in _NOT_FINITE.items() if infinite])
@pytest.mark.parametrize(("name", "is_vector"), [("mask", False), ("norm.weight", True)])
def test_masks_and_vectors_may_have_infinity(
    dtype: str, name: str, is_vector: bool, source: Path, tmp_path: Path
) -> None:
    write_one(source, dtype, _NOT_FINITE[dtype][1], name, is_vector=is_vector)
    convert(source, tmp_path / "root", model_id=M, layout="checkpoint")


_LARGEST = {"F32": b"\xff\xff\x7f\xff", "BF16": b"\x7f\xff", "F16": b"\xff\xfb", "F8_E4M3": b"\x7e"}


@pytest.mark.parametrize("dtype", [dtype for dtype, (_, infinite) in _NOT_FINITE.items() if infinite])
def test_masks_may_be_full_of_infinity_and_of_the_least_number_and_have_no_nan(
    dtype: str, source: Path, tmp_path: Path
) -> None:
    nan, infinite = _NOT_FINITE[dtype]
    full = infinite + _LARGEST.get(dtype, infinite)
    write_one(source, dtype, infinite, "mask", others=full)
    convert(source, tmp_path / "root", model_id=M, layout="checkpoint")
    write_one(source, dtype, nan, "mask", others=full)
    with pytest.raises(ShardCorrupt, match=rf"'mask'.*is NaN at \[{PLACE[0]}, {PLACE[1]}\]"):
        convert(source, tmp_path / "other", model_id=M, layout="checkpoint")


def test_the_largest_numbers_are_no_infinity(source: Path, tmp_path: Path) -> None:
    for dtype, number in _LARGEST.items():
        write_one(source, dtype, number, "up.weight")
        convert(source, tmp_path / dtype, model_id=M, layout="checkpoint")
