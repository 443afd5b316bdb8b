"""Random models: in a store, as fleets load them, or in memory, as an engine computes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hotswap.model import Layout

__all__ = ["hybrid_config", "llama_in_engine", "write_hybrid", "write_llama"]


def write_llama(
    directory: Path,
    *,
    hidden: int,
    layers: int,
    name: str = "m",
    seed: int = 0,
    intermediate: int | None = None,
    kv_heads: int = 2,
    max_tokens: int = 2048,
    dtype: str | None = None,
    vocabulary: int = 2048,
    tokenizer: str | None = None,
    end_token: int | None = None,
    layout: Layout = "modules",
) -> int:
    """Write a checkpoint at `directory / name` and add it to `directory / "store"`.

    Returns the bytes of its weights. It has heads of 64.

    Args:
        directory: Exists; several models may be written to one.
        hidden: Width of the model.
        layers: Depth of the model.
        name: Id of the model in the store.
        seed: Of the weights.
        intermediate: Width of the feed-forward part; three times `hidden` by default.
        kv_heads: Number of key and value heads.
        max_tokens: Longest context.
        dtype: Of the weights; float32 by default.
        vocabulary: Number of token ids.
        tokenizer: The text of its `tokenizer.json`; none by default.
        end_token: Its end token; none by default, so it never generates an end of sequence.
        layout: How the store keeps it.
    """
    import torch
    import transformers

    config: Any = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate or 3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 64),
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_tokens,
        eos_token_id=end_token,
        **({} if dtype is None else {"dtype": dtype}),
    )
    torch.manual_seed(seed)
    return _write(config, directory, name, layout=layout, tokenizer=tokenizer)


def write_hybrid(directory: Path, *, hidden: int, layers: int, max_tokens: int = 2048) -> int:
    """Write a random LFM2 in bfloat16 like `write_llama`, as model "m" with 2,048 token ids."""
    import torch

    config = hybrid_config(hidden, layers, max_tokens=max_tokens, vocabulary=2048)
    config.dtype = torch.bfloat16
    torch.manual_seed(0)
    return _write(config, directory, "m")


def hybrid_config(hidden: int, layers: int, *, max_tokens: int, vocabulary: int) -> Any:
    """Return the configuration of an LFM2: the shape of LFM2-350M with 1,024 and 16, but for the vocabulary.

    Six of 16 layers have attention, and ten a convolution, which keeps a state for each request.
    """
    import transformers

    attending = {2, 5, 8, 10, 12, 14}
    return transformers.Lfm2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=9 * hidden // 2,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 64),
        num_key_value_heads=max(1, hidden // 128),
        max_position_embeddings=max_tokens,
        layer_types=["full_attention" if at in attending else "conv" for at in range(layers)],
        conv_dim=hidden,  # which vLLM reads, and files of LFM2 have
        block_dim=hidden,
    )


def _write(
    config: Any, directory: Path, name: str, *, layout: Layout = "modules", tokenizer: str | None = None
) -> int:
    """Write a random model, add it to the store, and return the bytes of its weights."""
    import transformers

    from hotswap.backends.stores.convert import convert

    models: Any = transformers.AutoModelForCausalLM
    model = models.from_config(config)
    model.save_pretrained(directory / name)
    if tokenizer is not None:
        (directory / name / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    convert(directory / name, directory / "store", model_id=name, layout=layout)
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


def llama_in_engine(hidden: int, layers: int, dtype: torch.dtype) -> Any:
    """Return a Llama on the CPU as an engine has it: weights packed, operations fused, paged attention."""
    import transformers

    from hotswap.backends.torch import attention
    from hotswap.backends.torch.fused import fuse
    from hotswap.backends.torch.linear import linear_layers
    from hotswap.backends.torch.packed_cache import PackedCache

    config: Any = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=1024,
    )
    attention.register()
    models: Any = transformers.AutoModelForCausalLM
    model = models.from_config(config, attn_implementation=attention.IMPLEMENTATION)
    model.to(dtype).eval().requires_grad_(False)
    cache = PackedCache(1 << 32)
    fuse(model)
    packed = cache.acquire(None, linear_layers(model))
    while cache.pack_next(packed):  # as an engine does between its steps
        pass
    return model
