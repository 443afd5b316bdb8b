"""Tokenizers from files: special tokens as the file says, typed errors for what is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

import hotswap.abc
from hotswap.backends.tokenizer import HfTokenizer
from hotswap.errors import ShardCorrupt, ShardMissing
from tests.text_tokenizers import byte_level, metaspace, sentencepiece, with_start_token


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


def byte_level_with(normalizer: normalizers.Normalizer) -> HfTokenizer:
    made = Tokenizer.from_str(byte_level().text)
    made.normalizer = normalizer
    return HfTokenizer(made)


BOUNDED = (
    byte_level(),
    with_start_token(),
    sentencepiece(),
    metaspace(),
    byte_level_with(normalizers.NFC()),
    byte_level_with(normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "_")])),
)
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(["the ", "ありがとう", "\u03b1\u0313\u0300\u0345", "<|end|>", "   "]),
    ),
    max_size=40,
).map("".join)


@pytest.mark.parametrize("tokenizer", BOUNDED)
@given(text=TEXTS, times=st.integers(1, 20))
def test_a_text_has_at_least_as_many_tokens_as_are_said_without_encoding_it(
    tokenizer: HfTokenizer, text: str, times: int
) -> None:
    assert tokenizer.least_tokens(text * times) <= len(tokenizer.encode(text * times))
    assert tokenizer.least_tokens("a" * 100_000) > 100


def test_a_tokenizer_that_may_drop_text_says_nothing_of_its_length(file: Path) -> None:
    unknown = Tokenizer(models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>", fuse_unk=True))
    blanks = Tokenizer.from_str(byte_level().text)
    blanks.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    split = Tokenizer.from_str(byte_level().text)
    split.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )
    shortened = byte_level_with(normalizers.Replace(Regex(" +"), " "))
    for tokenizer in (HfTokenizer.read(file), *map(HfTokenizer, (unknown, blanks, split)), shortened):
        assert tokenizer.least_tokens(" " * 100_000) == 0


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
