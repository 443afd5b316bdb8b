"""The command line: what it prints, and what it returns when something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotswap.cli import main
from tests.backends.stores.models import put


def test_list_tells_models_and_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, "one", size=1 << 20)
    put(tmp_path, "two")
    assert main(["store", "list", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "one\t1 MiB\tTestForCausalLM",
        "two\t20 KiB\tTestForCausalLM",
    ]


def test_verify_finds_the_damaged_model_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest, _ = put(tmp_path, "bad")
    put(tmp_path, "good")
    assert main(["store", "verify", str(tmp_path)]) == 0
    file = tmp_path / "bad" / manifest.shards[1].file
    data = bytearray(file.read_bytes())
    data[7] ^= 1
    file.write_bytes(data)
    capsys.readouterr()
    assert main(["store", "verify", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "good: 20 KiB whole\n"
    assert file.name in captured.err
    assert main(["store", "verify", str(tmp_path), "good"]) == 0


@pytest.mark.parametrize(
    "command", [["convert", "{}/nowhere", "{}/root"], ["store", "verify", "{}", "nowhere"]]
)
def test_an_error_is_one_line_and_returns_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert main([word.format(tmp_path) for word in command]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hotswap: ")
    assert "nowhere" in error
    assert "Traceback" not in error


def test_convert_then_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    source, root = tmp_path / "tiny", tmp_path / "root"
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(source)
    command = ["convert", str(source), str(root), "--dtype", "bfloat16", "--max-file-size", "4 KiB"]
    assert main(command) == 0
    assert main(["store", "verify", str(root), "tiny"]) == 0
    assert main(command) == 2
    assert "--replace" in capsys.readouterr().err
    assert main([*command, "--replace"]) == 0
