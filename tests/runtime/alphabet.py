"""A checkpoint of a chat model whose answers are known: each letter is followed by the next of the alphabet.

Its greedy next token depends on the last token alone: the beginning of an answer is followed by `a`, `z` by
the end of the turn, every letter by the next, and a blank by a quotation mark. So what it says is encoded
again as it was generated.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def tokenizer(*more: str) -> Tokenizer:
    """A token for every byte, those for chats, and `more`; texts get the start token."""
    vocabulary = {piece: id for id, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *more)]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def checkpoint(
    directory: Path, *, template: str = TEMPLATE, generation: dict[str, Any] | None = None
) -> Path:
    """Write the model with its text files, and room for three more tokens; return its directory."""
    words = tokenizer()
    ids = [words.token_to_id(token) for token in ("<|assistant|>", *ascii_lowercase, "<|end|>")]
    following = dict(pairwise(ids))
    quote, *blanks = (words.encode(text, add_special_tokens=False).ids[0] for text in '" \n\t')
    following |= dict.fromkeys(blanks, quote)  # or a grammar would be given blanks for ever
    size = (words.get_vocab_size() + 3 + 7) // 8 * 8
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ids[-1],
    )
    module = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.model.embed_tokens.weight.copy_(torch.eye(size))
        module.model.norm.weight.fill_(1.0)
        for layer in module.model.layers:
            layer.input_layernorm.weight.fill_(1.0)
            layer.post_attention_layernorm.weight.fill_(1.0)
        for token in range(size):
            module.lm_head.weight[following.get(token, token), token] = 1.0
    module.save_pretrained(directory)
    words.save(str(directory / "tokenizer.json"))
    config_of_text = {"chat_template": template, "bos_token": "<s>", "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config_of_text))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory
