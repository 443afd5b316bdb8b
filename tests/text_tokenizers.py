"""Tokenizers of the two families that language models use, small enough for every byte to matter."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from hotswap.backends.tokenizer import HfTokenizer

CORPUS = (
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse",
    "ありがとう世界 さようなら ありがとう",
    "naïve café déjà vu, 😀😀 👩‍👩‍👧 𝄞",
)
SPECIAL = "<|end|>"
START = "<|start|>"
NUM_SPECIAL = 3
BYTE_LEVEL_SIZE = 320


@cache
def byte_level() -> HfTokenizer:
    """Byte-level BPE, as of GPT-2, Llama 3 and Qwen: tokens are pieces of UTF-8, cut anywhere."""
    return HfTokenizer(_byte_level_bpe())


@cache
def _byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BYTE_LEVEL_SIZE,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@cache
def with_start_token() -> HfTokenizer:
    """A byte-level tokenizer that puts a start token before each text, as Llama 3's does."""
    tokenizer = Tokenizer.from_str(_byte_level_bpe().to_str())
    tokenizer.add_special_tokens([AddedToken(START, special=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, tokenizer.token_to_id(START))]
    )
    return HfTokenizer(tokenizer)


def one_byte_each(text: str) -> list[int]:
    """The longest way to write a text in `byte_level`: a token for every byte."""
    return [_byte_level_bytes()[byte] for byte in text.encode()]


@cache
def _byte_level_bytes() -> dict[int, int]:
    """The token of every byte: its piece is the byte's character of Latin-1, or a substitute over U+0100."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    substituted = [byte for byte in range(256) if byte not in visible]
    pieces = {byte: chr(byte) for byte in visible} | {
        byte: chr(256 + n) for n, byte in enumerate(substituted)
    }
    vocabulary = _byte_level_bpe().get_vocab()
    return {byte: vocabulary[piece] for byte, piece in pieces.items()}


WORDS = ("▁", "▁▁", "▁the", "the", "▁a", "a", "b", "c", "▁c", "é", "▁é", "世", ".", ",")


@cache
def sentencepiece() -> HfTokenizer:
    """SentencePiece BPE with byte fallback, as of Llama 2 and Mistral: bytes only for what has no piece."""
    return HfTokenizer(_with_bytes(decoders.Sequence(_LLAMA_DECODERS)))


@cache
def metaspace() -> HfTokenizer:
    """The same pieces with the Metaspace decoder behind byte fallback."""
    return HfTokenizer(_with_bytes(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])))


_LLAMA_DECODERS = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]
PIECES_SIZE = NUM_SPECIAL + 256 + len(WORDS)


def _with_bytes(decoder: decoders.Decoder) -> Tokenizer:
    pieces = ["<unk>", "<s>", SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    model = models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:NUM_SPECIAL]])
    return tokenizer


def byte_tokens(text: str) -> list[int]:
    """The byte tokens of a text in the tokenizers with byte fallback."""
    return [NUM_SPECIAL + byte for byte in text.encode()]


def word_token(word: str) -> int:
    """The token of a piece in the tokenizers with byte fallback."""
    return NUM_SPECIAL + 256 + WORDS.index(word)
