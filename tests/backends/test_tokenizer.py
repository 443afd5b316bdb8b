"""Tokenizers from files: special tokens as the file says, typed errors for what is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

import hotswap.abc
from hotswap.backends.tokenizer import HfTokenizer
from hotswap.errors import ShardCorrupt, ShardMissing


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Words, a start token that the post-processor adds, and what training left behind."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "hello": 2, "world": 3}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_the_start_token_is_added_and_left_out_again(file: Path) -> None:
    tokenizer = HfTokenizer.read(file)
    assert isinstance(tokenizer, hotswap.abc.Tokenizer)
    assert tokenizer.encode("hello world hello") == [1, 2, 3, 2]
    assert tokenizer.decode([1, 2, 3]) == "hello world"
    assert HfTokenizer.read(file.parent).encode("world") == [1, 3]


def test_what_is_no_tokenizer_is_told_by_name(file: Path) -> None:
    with pytest.raises(ShardMissing, match=r"elsewhere.*tokenizer\.json|elsewhere"):
        HfTokenizer.read(file.parent / "elsewhere")
    file.write_text("{}")
    with pytest.raises(ShardCorrupt, match=r"tokenizer\.json"):
        HfTokenizer.read(file)


def test_without_the_library_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['tokenizers'] = None; import hotswap.backends.tokenizer"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "BackendMissing" in done.stderr
    assert "pip install 'hotswap[torch]'" in done.stderr
