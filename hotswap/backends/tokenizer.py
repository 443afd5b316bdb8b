"""Hugging Face tokenizers: the `tokenizers` library reads `tokenizer.json` and runs no code of the model."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from threading import Lock
from weakref import WeakKeyDictionary

try:
    from tokenizers import Tokenizer as _Tokenizer
except ImportError as exc:
    from hotswap.errors import BackendMissing

    raise BackendMissing("Text needs the tokenizers library: pip install 'hotswap[torch]'.") from exc

from hotswap.backends.literal_text import (
    GuardedText,
    GuardingTemplate,
    LiteralText,
    control_tokens,
    renamed,
)
from hotswap.backends.token_bound import most_characters
from hotswap.errors import ShardCorrupt, ShardMissing
from hotswap.text import ChatTemplate, SupportsSource

__all__ = ["HfTokenizer"]

_MOST_TEMPLATES = 16


class HfTokenizer:
    """The tokenizer of a checkpoint, as its `tokenizer.json` describes it.

    Encoding adds the special tokens that the file's post-processor adds (a start token, mostly), but not a
    second time where the text begins with them, as chat templates' texts do. Threads may share it; encoding
    lets other threads run.
    """

    def __init__(self, tokenizer: _Tokenizer, *, digest: bytes = b"") -> None:
        # What the file says of truncation and padding was right for training batches, never for a prompt.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._digest = digest
        self._bound = Lock()
        self._most_characters: int | None = None
        self._is_bound_known = False
        self._naming, self._making = Lock(), Lock()  # the second is held while a tokenizer is made
        self._literals = dict[str, LiteralText]()
        self._renamed: WeakKeyDictionary[LiteralText, HfTokenizer] = WeakKeyDictionary()

    @classmethod
    def parse(cls, text: bytes, *, name: str = "tokenizer.json") -> HfTokenizer:
        """Make a tokenizer from the text of a `tokenizer.json`; `name` is what errors call it.

        Raises:
            ShardCorrupt: the text is not one.
        """
        try:
            return cls(_Tokenizer.from_buffer(text), digest=sha256(text).digest())
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

    def __eq__(self, other: object) -> bool:
        """Whether both were parsed from the same text."""
        if not isinstance(other, HfTokenizer) or not self._digest:
            return self is other
        return self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest) if self._digest else id(self)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, with special tokens around it unless told otherwise."""
        if isinstance(text, GuardedText):
            return self._with_other_names(text.literals).encode(
                text.encodable, add_special_tokens=add_special_tokens
            )
        # `encode` would hold Python's lock, and keep the offsets of every token.
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids = encoding.ids
        if not add_special_tokens or not self._tokenizer.num_special_tokens_to_add(False):
            return ids
        added, special = 0, encoding.special_tokens_mask
        while added < len(ids) and special[added]:
            added += 1
        return ids[added:] if added and ids[:added] == ids[added : 2 * added] else ids

    def guarding(self, template: ChatTemplate) -> ChatTemplate:
        """Return a template that writes the same, in texts whose parts of clients `encode` takes for text.

        Control tokens are the special ones, and other added ones that the template writes. The first text
        with something that reads like one takes a second tokenizer, which takes as long to make as the first
        took to read; `encode` raises `InvalidRequest` if it cannot be made.
        """
        source = template.source if isinstance(template, SupportsSource) else ""
        with self._naming:
            if source not in self._literals:
                if len(self._literals) >= _MOST_TEMPLATES:  # of adapters that have come and gone
                    self._literals = {}
                self._literals[source] = LiteralText(control_tokens(self._tokenizer, source))
            return GuardingTemplate(template, self._literals[source])

    def _with_other_names(self, literals: LiteralText) -> HfTokenizer:
        with self._making:
            if literals not in self._renamed:
                self._renamed[literals] = HfTokenizer(renamed(self._tokenizer, literals.control_names))
            return self._renamed[literals]

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` surely has, 0 if its tokenizer may drop parts of texts.

        The first call looks for the longest token, tens of milliseconds.
        """
        with self._bound:
            if not self._is_bound_known:
                self._most_characters, self._is_bound_known = most_characters(self._tokenizer), True
        return -(-len(text) // self._most_characters) if self._most_characters else 0

    @property
    def text(self) -> str:
        """The tokenizer as the text of a `tokenizer.json`, without truncation and padding."""
        return self._tokenizer.to_str()

    @property
    def added_tokens(self) -> dict[int, str]:
        """The tokens beside the vocabulary proper, by id: special ones, mostly."""
        return {id: token.content for id, token in self._tokenizer.get_added_tokens_decoder().items()}

    @property
    def num_ids(self) -> int:
        """One more than the largest token id that it has."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def id_of(self, piece: str) -> int | None:
        """Return the token that the vocabulary writes so; `None` if it has none."""
        return self._tokenizer.token_to_id(piece)

    def piece(self, token: int) -> str | None:
        """Return how the vocabulary writes a token; `None` if it has none of that id."""
        return self._tokenizer.id_to_token(token)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `tokens`; incomplete characters are U+FFFD."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
