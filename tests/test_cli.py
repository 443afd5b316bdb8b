"""The command line: what it prints, and what it returns when something is wrong."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hotswap import ModelId
from hotswap.backends.stores import NvmeStore
from hotswap.cli import main
from hotswap.offline.replay import dump_view
from hotswap.profiling import Profile
from tests.backends.stores.models import UNIT, put, read
from tests.policies.loads import running
from tests.policies.views import fleet, model, serving, waiting

ROOT = Path(__file__).parents[1]


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the command as a shell does."""
    command = [sys.executable, "-m", "hotswap.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def answer(*words: object, status: int = 0) -> dict[str, Any]:
    """Run the command with `--json`; what it prints is one object."""
    done = run(*words, "--json")
    assert done.returncode == status, done.stderr
    value = json.loads(done.stdout)
    assert isinstance(value, dict)
    return value


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[7] ^= 1
    file.write_bytes(data)


async def test_ls_tells_what_is_there_the_next_to_go_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, _ = put(tmp_path, "one", size=1 << 20, file_bytes=1 << 20)
    put(tmp_path, "two", world_size=2)
    async with NvmeStore(tmp_path) as store:
        await read(store, one.shards[0])
    assert main(["store", "ls", str(tmp_path)]) == 0
    head, *rows, foot = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head[:2] == ["MODEL", "SIZE"]
    assert [(row[:4], row[-2:]) for row in rows] == [
        (["two", "40", "KiB", "2"], ["idle", "TestForCausalLM"]),
        (["one", "1", "MiB", "1"], ["idle", "TestForCausalLM"]),
    ]
    assert foot[:2] == ["2", "models,"]


async def test_ls_says_what_is_in_use_and_what_is_damaged(tmp_path: Path) -> None:
    put(tmp_path, "bad")
    put(tmp_path, "good")
    index = tmp_path / "bad" / "index.json"
    index.write_text("{")
    async with NvmeStore(tmp_path) as store:
        await store.pin(ModelId("good"))
        told = answer("store", "ls", tmp_path, status=1)
    assert set(told) == {"root", "used_bytes", "models"}
    keys = {"model", "bytes", "files", "world_size", "architecture", "quantization"}
    keys |= {"last_used", "in_use", "error"}
    models = {model["model"]: model for model in told["models"]}
    assert all(set(model) == keys for model in models.values())
    assert str(index) in models["bad"]["error"]
    assert models["good"]["error"] is None
    assert (models["good"]["in_use"], models["bad"]["in_use"]) == (True, False)
    assert told["used_bytes"] == 10 * UNIT


def test_verify_finds_the_damaged_model_and_goes_on(tmp_path: Path) -> None:
    manifest, _ = put(tmp_path, "bad")
    put(tmp_path, "good")
    assert run("store", "verify", tmp_path).returncode == 0
    file = tmp_path / "bad" / manifest.shards[1].file
    damage(file)
    done = run("store", "verify", tmp_path)
    assert done.returncode == 1
    assert [line.split()[0::3] for line in done.stdout.splitlines()[1:]] == [
        ["bad", "damaged"],
        ["good", "whole"],
    ]
    assert file.name in done.stderr
    told = answer("store", "verify", tmp_path, status=1)
    assert [(model["model"], model["bytes"], model["whole"]) for model in told["models"]] == [
        ("bad", 5 * UNIT, False),
        ("good", 5 * UNIT, True),
    ]
    assert set(told["models"][0]) == {"model", "bytes", "whole", "error"}
    assert run("store", "verify", tmp_path, "good").returncode == 0


def test_rm_removes_one_model(tmp_path: Path) -> None:
    put(tmp_path, "one")
    put(tmp_path, "two")
    assert answer("store", "rm", tmp_path, "one") == {
        "root": str(tmp_path),
        "model": "one",
        "freed_bytes": 5 * UNIT,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["two"]


async def test_rm_leaves_what_is_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, "one")
    async with NvmeStore(tmp_path) as store:
        await store.pin(ModelId("one"))
        assert main(["store", "rm", str(tmp_path), "one"]) == 2
        assert "in use" in capsys.readouterr().err
        assert (await store.manifest(ModelId("one"))).weight_bytes == 5 * UNIT


def test_bench_compares_the_methods_of_reading(tmp_path: Path) -> None:
    put(tmp_path, "one", size=64 * UNIT, world_size=2, file_bytes=16 * UNIT)
    options = ("--chunk-size", "16 KiB", "--threads", 2, "--depth", 3, "--repeat", 2)
    told = answer("store", "bench", tmp_path, "one", *options)
    assert set(told) == {"model", "size_bytes", "chunk_bytes", "threads", "depth", "direct", "methods"}
    assert (told["size_bytes"], told["chunk_bytes"], told["threads"], told["depth"]) == (
        128 * UNIT,
        16384,
        2,
        3,
    )
    assert [method["name"] for method in told["methods"]] == ["raw", "direct", "buffered", "host"]
    for method in told["methods"]:
        assert set(method) == {"name", "seconds", "bytes_per_s", "ratio_to_raw"}
        assert len(method["seconds"]) == 2
        assert method["bytes_per_s"] > 0
    assert told["methods"][0]["ratio_to_raw"] == 1
    text = run("store", "bench", tmp_path, "one", *options).stdout.splitlines()
    assert [line.split()[0] for line in text[2:]] == ["raw", "direct", "buffered", "host"]


@pytest.mark.parametrize(
    "words",
    [
        ("store", "add", "{}/nowhere", "{}/root"),
        ("store", "ls", "{}/nowhere"),
        ("store", "verify", "{}", "nowhere"),
        ("store", "rm", "{}", "nowhere"),
        ("store", "bench", "{}", "nowhere"),
        ("models", "check", "{}/nowhere"),
    ],
)
def test_an_error_is_its_message_and_nothing_else(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = run(*(word.format(tmp_path) for word in words), "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("hotswap: ")
    assert done.stderr.count("\n") == 1
    assert "nowhere" in done.stderr


def test_add_then_verify(tmp_path: Path, checkpoint_directory: Path) -> None:
    root = tmp_path / "root"
    command = ["store", "add", checkpoint_directory, root, "--id", "tiny", "--dtype", "bfloat16"]
    done = run(*command, "--world-size", 2, "--max-file-size", "4 KiB", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no progress without a terminal
    told = json.loads(done.stdout)
    assert set(told) == {"root", "model", "bytes", "files", "layout", "world_size", "quantization"}
    assert (told["model"], told["world_size"], told["quantization"]) == ("tiny", 2, "")
    assert told["bytes"] == sum(file.stat().st_size for file in (root / "tiny").glob("*.bin"))
    assert main(["store", "verify", str(root), "tiny"]) == 0


def test_fit_measures_an_engine_and_writes_a_profile(
    tmp_path: Path,
    checkpoint_directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However busy the machine is: steps of a tiny model may then follow no formula."""
    monkeypatch.setattr("hotswap.commands.fit.MOST_MEAN_ERROR", math.inf)
    root, profile = tmp_path / "root", tmp_path / "mine.json"
    assert main(["store", "add", str(checkpoint_directory), str(root), "--id", "tiny"]) == 0
    words = ["fit", str(root), "tiny", "--out", str(profile), "--quick", "--threads", "1", "--json"]
    capsys.readouterr()
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["device"] == "cpu"
    assert told["num_steps"] >= 10
    assert Profile.read(profile).weight_bytes > 0
    assert main([*words[:2], "unknown", *words[3:]]) == 2
    assert main(["fit", str(tmp_path / "nowhere"), *words[2:]]) == 2
    assert main([*words[:4], str(tmp_path / "gone" / "mine.json")]) == 2


def test_add_quantises_in_a_scheme_there_is(
    tmp_path: Path, checkpoint_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["store", "add", str(checkpoint_directory), str(tmp_path), "--id", "tiny", "--quantize"]
    assert main([*command, "fp4"]) == 2
    assert "fp8-e4m3-channel" in capsys.readouterr().err
    assert main([*command, "fp8-e4m3"]) == 0
    assert "as fp8-e4m3" in capsys.readouterr().out
    assert main(["store", "verify", str(tmp_path), "tiny"]) == 0
    (told,) = answer("store", "ls", tmp_path)["models"]
    assert told["quantization"] == "fp8-e4m3"


def test_check_says_what_a_torch_engine_serves(tmp_path: Path, checkpoint_directory: Path) -> None:
    from transformers import RwkvConfig

    assert answer("models", "check", checkpoint_directory) == {
        "source": str(checkpoint_directory),
        "served": "exact",
        "why": "",
    }
    assert main(["store", "add", str(checkpoint_directory), str(tmp_path), "--id", "tiny"]) == 0
    assert main(["models", "check", str(tmp_path / "tiny")]) == 0
    RwkvConfig().save_pretrained(tmp_path / "rwkv")
    done = run("models", "check", tmp_path / "rwkv")
    assert done.returncode == 1
    assert "refused. The 'rwkv' model" in done.stdout


def test_check_takes_the_directory_it_is_called_in(
    tmp_path: Path, checkpoint_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["store", "add", str(checkpoint_directory), str(tmp_path), "--id", "tiny"]) == 0
    monkeypatch.chdir(tmp_path / "tiny")
    assert main(["models", "check", "."]) == 0


def test_check_names_a_config_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    assert main(["models", "check", str(tmp_path)]) == 2
    assert "config.json' is not UTF-8" in capsys.readouterr().err

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert main(["models", "check", str(tmp_path)]) == 2
    assert "cannot be read: Permission denied" in capsys.readouterr().err


def test_add_replaces_only_when_told(
    tmp_path: Path, checkpoint_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["store", "add", str(checkpoint_directory), str(tmp_path / "root")]
    assert main(command) == 0
    assert main(command) == 2
    assert "--replace" in capsys.readouterr().err
    assert main([*command, "--replace"]) == 0


@pytest.fixture(scope="module")
def checkpoint_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    source = tmp_path_factory.mktemp("sources") / "llama"
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(source)
    return source


def test_it_tells_its_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"hotswap {version('hotswap')}\n")


@pytest.mark.parametrize("words", [("config", "schema"), ("--version",)])
def test_a_reader_that_leaves_ends_it_silently(words: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hotswap.cli", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_cannot_be_written_is_an_error_of_one_line() -> None:
    command = [sys.executable, "-m", "hotswap.cli", "config", "schema"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("hotswap: The output could not be written")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [("{bad", "double quotes"), ("[1]", "no view of a fleet"), ('{"a": 1}', "now_s: Field required")],
)
def test_a_view_that_is_none_is_refused_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "view.json").write_text(text)
    done = run("plan", tmp_path / "view.json", "--scheduler", "CostSwap()")
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("place", "key", "value"),
    [
        ("", "now_s", math.inf),
        ("models", "num_running", -5),
        ("models", "weight", 0.0),
        ("models", "weight", math.inf),
        ("models", "last_evicted_s", 5.1),  # which is later than now_s
        ("models", "unserved_since_s", math.nan),
        ("instances", "num_requests", -1),
        ("instances", "serving_since_s", math.inf),
        ("instances", "memory_bytes", -1),
        ("waiting", "waiting_since_s", math.inf),
        ("waiting", "waiting_since_s", -math.inf),
        ("waiting", "waiting_since_s", -1.0),
        ("waiting", "arrived_s", 6.0),
        ("running", "since_s", -1.0),
        ("running", "num_remaining", -1),
        ("times", "unload_s", -0.1),
        ("times", "token_s", math.inf),
        ("times", "load_bytes_per_s", [["host", 0.0]]),
    ],
)
def test_a_view_that_no_fleet_has_is_refused_in_one_line(
    place: str, key: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queue, models = (waiting("b", 1.0),), [model("a", 1), model("b", 1, waiting=1)]
    whole = fleet([serving("e0", "a", 1)], models, now_s=5.0, waiting=queue)
    view = json.loads(dump_view(replace(whole, running=(running("r", on="e0"),))))
    part = view[place] if place else view
    (part[0] if isinstance(part, list) else part)[key] = value
    (tmp_path / "view.json").write_text(json.dumps(view))
    assert main(["plan", str(tmp_path / "view.json"), "--scheduler", "WeightedLoadSwap()"]) == 2
    error = capsys.readouterr().err
    assert f"{key} " in error
    assert "; give " in error
    assert error.count("\n") == 1


def test_least_searches_for_every_scheduler_that_is_named() -> None:
    words = ("poisson:rate=1,seconds=20,models=2", "--warm", 5, "--most", 4)
    found = answer("least", *words, "--scheduler", "CostSwap()", "--scheduler", "KeepAliveSwap()")
    assert [search["scheduler"] for search in found["searches"]] == ["CostSwap()", "KeepAliveSwap()"]
    assert all(search["engines"] for search in found["searches"])
