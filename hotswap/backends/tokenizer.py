"""Hugging Face tokenizers: the `tokenizers` library reads `tokenizer.json` and runs no code of the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

try:
    from tokenizers import Tokenizer as _Tokenizer
except ImportError as exc:
    from hotswap.errors import BackendMissing

    raise BackendMissing("Text needs the tokenizers library: pip install 'hotswap[torch]'.") from exc

from hotswap.errors import ShardCorrupt, ShardMissing

__all__ = ["HfTokenizer"]


class HfTokenizer:
    """The tokenizer of a checkpoint, as its `tokenizer.json` describes it.

    Encoding adds the special tokens that the file's post-processor adds (a start token, mostly); decoding
    leaves special tokens out. Threads may share it.
    """

    def __init__(self, tokenizer: _Tokenizer) -> None:
        # What the file says of truncation and padding was right for training batches, never for a prompt.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    @classmethod
    def parse(cls, text: bytes, *, name: str = "tokenizer.json") -> HfTokenizer:
        """Make a tokenizer from the text of a `tokenizer.json`; `name` is what errors call it.

        Raises:
            ShardCorrupt: the text is not one.
        """
        try:
            return cls(_Tokenizer.from_buffer(text))
        except Exception as exc:  # the library raises nothing narrower
            raise ShardCorrupt(f"{name!r} is no tokenizer ({exc}). Fetch the checkpoint again.") from exc

    @classmethod
    def read(cls, path: str | Path) -> HfTokenizer:
        """Read a `tokenizer.json`, or the one in a directory.

        Raises:
            ShardMissing: there is none.
            ShardCorrupt: it cannot be read.
        """
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        try:
            text = file.read_bytes()
        except OSError as exc:
            raise ShardMissing(f"There is no tokenizer at {str(file)!r} ({exc.strerror}).") from exc
        return cls.parse(text, name=str(file))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, with the special tokens that the model wants around it."""
        return self._tokenizer.encode(text).ids

    @property
    def text(self) -> str:
        """The tokenizer as the text of a `tokenizer.json`, without truncation and padding."""
        return self._tokenizer.to_str()

    def piece(self, token: int) -> str | None:
        """Return how the vocabulary writes a token; `None` if it has none of that id."""
        return self._tokenizer.id_to_token(token)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` without special tokens; incomplete characters become U+FFFD."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)
