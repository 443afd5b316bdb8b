"""The skeleton of an architecture: modules without weights, made once, bound to any model of the kind."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hotswap.backends.torch import attention
from hotswap.backends.torch.adapters.targets import Target
from hotswap.backends.torch.coded import Coding, Fp8Linear, attach, detach
from hotswap.backends.torch.fused import Fused, fuse
from hotswap.backends.torch.kv import LayerShape
from hotswap.backends.torch.linear import LinearLayer, linear_layers
from hotswap.backends.torch.weights import Views
from hotswap.errors import ShardCorrupt, UnsupportedModel
from hotswap.model import TensorSpec

__all__ = ["Skeleton", "SkeletonCache", "canonical", "main_dtype", "parse_config"]

# RoPE variants whose factors transformers picks by the longest position of a whole row: one long request
# would change the others.
_ROW_WISE_ROPE = frozenset({"dynamic", "longrope", "su"})

# Keys of a config that change neither the modules nor what they compute.
_IMMATERIAL = frozenset(
    {"_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "torch_dtype"}
    | {"transformers_version", "use_cache"}
)

# Meta parameters are made by replacing a method of `nn.Module` for a moment: one thread at a time, because
# what is replaced belongs to the process.
_PATCH = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a named tensor belongs: `holder[key]`, a dict of some module of the skeleton."""

    name: str
    holder: dict[str, Any]
    key: str
    original: Tensor

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.original, nn.Parameter)


class Skeleton:
    """The modules of one architecture on a device, without weights until `bind`.

    Parameters are on the meta device, buffers (rotary frequencies and the like) are real. Binding puts views
    of a flat buffer in the parameters' places: microseconds for each, whatever their size.

    Attributes:
        targets: Which of its layers can have adapters, for each way of computing that was asked about.
    """

    def __init__(self, config_text: str, device: torch.device) -> None:
        self.key = canonical(config_text)
        self.config = parse_config(config_text)
        self.module = _build(self.config, device)
        self.dtype = torch.float32
        self._slots = tuple(_slots(self.module))
        self._multiplying = tuple(_multiplying(self.module))
        self.targets: dict[str, Mapping[str, Target]] = {}
        self._coded: tuple[Fp8Linear, ...] = ()
        on_cpu = device.type == "cpu"
        self.linears: tuple[LinearLayer, ...] = linear_layers(self.module) if on_cpu else ()
        self._fused: tuple[Fused, ...] = fuse(self.module) if on_cpu else ()
        text_config = self.config.get_text_config()
        self.num_layers = int(getattr(text_config, "num_hidden_layers", 0))
        self.vocabulary = int(self.module.get_input_embeddings().num_embeddings)
        self.max_positions: int | None = getattr(text_config, "max_position_embeddings", None)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors that `bind` wants, in the shapes that the architecture gives them."""
        return {slot.name: tuple(slot.original.shape) for slot in self._slots}

    @property
    def num_logits(self) -> int:
        """How many logits a token has; some models have more than tokens."""
        head = self.module.get_output_embeddings()
        return self.vocabulary if head is None else int(head.weight.shape[0])

    def narrow(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Want the tensors named alone, in other shapes: those that one rank of several has."""
        self._slots = tuple(
            replace(slot, original=_placeholder(slot, shapes[slot.name]))
            for slot in self._slots
            if slot.name in shapes
        )

    def bind(self, flat: Tensor, specs: Sequence[TensorSpec], coding: Coding | None = None) -> None:
        """Make every parameter and persistent buffer a view of `flat`, but for weights that stay codes.

        In the place of these stand parameters without values, and their layers compute from the codes.

        Raises:
            ShardCorrupt: a tensor is missing, or not of the shape that the architecture has.
        """
        self.dtype = self.config.dtype = main_dtype(specs) if coding is None else coding.dtype
        known = {spec.name: spec for spec in specs}
        views, made = Views(flat), dict[int, Tensor]()
        coded = frozenset[str]() if coding is None else coding.names
        for slot in self._slots:
            if slot.name in coded:
                slot.holder[slot.key] = _without_values(slot, self.dtype)
                continue
            spec = known.get(slot.name)
            if spec is None or spec.shape != tuple(slot.original.shape):
                found = "missing" if spec is None else f"of shape {list(spec.shape)}"
                raise ShardCorrupt(
                    f"Tensor {slot.name!r} is {found}, the architecture wants {list(slot.original.shape)}; "
                    "convert the model again."
                )
            if spec.offset_bytes not in made:
                view = views.at(spec)
                parameter = nn.Parameter(view, requires_grad=False) if slot.is_parameter else view
                made[spec.offset_bytes] = parameter
            slot.holder[slot.key] = made[spec.offset_bytes]
        if coding is not None:
            self._coded = attach(self.module, coding, known, views)

    @property
    def coded(self) -> tuple[Fp8Linear, ...]:
        """What computes the linear layers whose weights are kept as codes."""
        return self._coded

    def unbind(self) -> None:
        """Let go of the flat buffer."""
        detach(self._coded)
        self._coded = ()
        for slot in self._slots:
            slot.holder[slot.key] = slot.original

    @property
    def linear_only(self) -> bool:
        """Whether linear layers that can be packed are all that multiplies by a matrix of what is bound.

        Other matrices, as of a mixture's experts, are multiplied nobody knows how.
        """
        packable = {id(layer.stored) for layer in self.linears if layer.packable}
        packable |= {id(coded.layer.weight) for coded in self._coded if coded.is_invariant}
        return all(id(table[key]) in packable for table, key in self._multiplying)

    @contextmanager
    def eager(self) -> Generator[None]:
        """Let the model run its own reference attention instead of ours, and its own small operations."""
        self.module.set_attn_implementation("eager")
        for fused in self._fused:
            fused.detach()
        try:
            yield
        finally:
            for fused in self._fused:
                fused.attach()
            self.module.set_attn_implementation(attention.IMPLEMENTATION)


@dataclass(slots=True)
class SkeletonCache:
    """Lends skeletons, and remembers which architectures were found to be served exactly.

    A skeleton has one borrower at a time. May be shared by the engines of a process; all methods may be
    called from any thread.

    Attributes:
        max_idle: How many skeletons are kept for later; the longest unused goes first.
        verified: Per architecture and device, the layers that its preflight saw.
        unadaptable: Likewise, its linear layers that no adapter can change.
    """

    max_idle: int = 8
    verified: dict[tuple[str, str], tuple[LayerShape, ...]] = field(
        default_factory=dict[tuple[str, str], tuple[LayerShape, ...]]
    )
    unadaptable: dict[tuple[str, str], set[str]] = field(default_factory=dict[tuple[str, str], set[str]])
    _idle: OrderedDict[int, tuple[str, str, Skeleton]] = field(
        default_factory=OrderedDict[int, tuple[str, str, Skeleton]]
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def borrow(self, config_text: str, device: torch.device) -> Skeleton:
        """Return a skeleton that nobody else has, building it if none is idle.

        Raises:
            UnsupportedModel: transformers does not know the architecture, or it cannot be served exactly.
            ShardCorrupt: the config is no JSON object.
        """
        wanted = (canonical(config_text), str(device))
        with self._lock:
            for ident, (*key, skeleton) in self._idle.items():
                if tuple(key) == wanted:
                    del self._idle[ident]
                    return skeleton
        return Skeleton(config_text, device)

    def give_back(self, skeleton: Skeleton, device: torch.device) -> None:
        """Take back what was lent; its weights are let go."""
        skeleton.unbind()
        with self._lock:
            self._idle[id(skeleton)] = (skeleton.key, str(device), skeleton)
            while len(self._idle) > self.max_idle:
                self._idle.popitem(last=False)


def main_dtype(specs: Sequence[TensorSpec]) -> torch.dtype:
    """The dtype that most weight bytes have."""
    sizes: dict[str, int] = {}
    for spec in specs:
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.size_bytes
    return cast("torch.dtype", getattr(torch, max(sizes, key=lambda name: sizes[name], default="float32")))


def _parse(config_text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(config_text, object_hook=_special_float)
    except ValueError as exc:
        raise ShardCorrupt(f"The manifest's config is not JSON ({exc}); convert the model again.") from exc
    if not isinstance(parsed, dict):
        raise ShardCorrupt("The manifest's config is not a JSON object; convert the model again.")
    return cast("dict[str, Any]", parsed)


def _special_float(parsed: dict[str, Any]) -> Any:
    """A float that JSON does not know, as transformers writes it."""
    return float(parsed["__float__"]) if parsed.keys() == {"__float__"} else parsed


@lru_cache(maxsize=256)
def canonical(config_text: str) -> str:
    """Return the same text for configs that have the same modules, which compute the same.

    Raises:
        ShardCorrupt: the config is no JSON object.
    """
    parsed = _parse(config_text)
    return json.dumps({k: v for k, v in parsed.items() if k not in _IMMATERIAL}, sort_keys=True)


def parse_config(config_text: str) -> Any:
    """Return transformers' config of a `config.json`.

    Raises:
        UnsupportedModel: transformers knows no such architecture or refuses the config, the weights are
            quantised, or the RoPE would make requests of a batch depend on each other.
        ShardCorrupt: the config is no JSON object.
    """
    parsed = _parse(config_text)
    kind = parsed.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"transformers knows no model type {kind!r}, and code from checkpoints is never run; "
            "update transformers or choose another model."
        )
    if "quantization_config" in parsed:
        raise UnsupportedModel(f"The {kind!r} checkpoint is quantised; convert the original weights.")
    configs: Any = CONFIG_MAPPING
    try:
        config: Any = configs[kind].from_dict(parsed)
    except Exception as exc:  # config classes check themselves with errors of their own
        raise UnsupportedModel(
            f"transformers refuses the config of the {kind!r} model ({exc}); fetch it again, or serve the "
            "model with another engine."
        ) from exc
    if ropes := _ropes(parsed) & _ROW_WISE_ROPE:
        raise UnsupportedModel(
            f"The {kind!r} model uses {sorted(ropes)[0]!r} RoPE, whose factors depend on the other requests "
            "of a batch; serve it with another engine, or remove the scaling from its config."
        )
    return config


def _ropes(node: object) -> set[str]:
    """Every RoPE type that a config names, at any depth: some name one for each kind of layer."""
    found: set[str] = set()
    if isinstance(node, dict):
        for key, value in cast("dict[str, object]", node).items():
            if key in {"rope_type", "type"} and isinstance(value, str):
                found.add(value)
            found |= _ropes(value)
    return found


def _build(config: Any, device: torch.device) -> Any:
    attention.register()
    models: Any = AutoModelForCausalLM
    try:
        with _meta_parameters():
            # In fp32, because another dtype would change the default of the whole process for a while; the
            # parameters get their dtype when they are bound.
            module: Any = models.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention.IMPLEMENTATION,
                trust_remote_code=False,
            )
    except (ValueError, KeyError, TypeError, AttributeError, NotImplementedError, ImportError) as exc:
        raise UnsupportedModel(
            f"transformers cannot build a causal language model of type {config.model_type!r} ({exc}); "
            "serve it with another engine."
        ) from exc
    module.tie_weights()
    module.eval().requires_grad_(False)
    for holder in cast("Iterator[nn.Module]", module.modules()):
        _, buffers, _ = _tables(holder)
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = buffer.to(device)
    return module


@contextmanager
def _meta_parameters() -> Generator[None]:
    """Put the parameters that this thread registers on the meta device; buffers are computed as usual.

    Under `torch.device("meta")` the buffers too would be without values.
    """
    thread = threading.get_ident()
    with _PATCH:
        original = nn.Module.register_parameter

        def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            original(module, name, param)
            if param is not None and not param.is_meta and threading.get_ident() == thread:
                parameters, _, _ = _tables(module)
                parameters[name] = nn.Parameter(param.detach().to("meta"), requires_grad=False)

        nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = original  # type: ignore[method-assign]


def _slots(module: Any) -> Iterator[_Slot]:
    named: Iterator[tuple[str, nn.Module]] = module.named_modules()
    for prefix, holder in named:
        lead = f"{prefix}." if prefix else ""
        parameters, buffers, computed = _tables(holder)
        for key, parameter in parameters.items():
            if parameter is not None:
                yield _Slot(lead + key, parameters, key, parameter)
        for key, buffer in buffers.items():
            if buffer is not None and key not in computed:
                yield _Slot(lead + key, buffers, key, buffer)


def _multiplying(module: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Where the matrices stand that are not looked up but multiplied by."""
    holders: Iterator[nn.Module] = module.modules()
    for holder in holders:
        parameters, _, _ = _tables(holder)
        for key, value in parameters.items():
            if value is not None and value.ndim > 1 and not isinstance(holder, nn.Embedding):
                yield parameters, key


def _without_values(slot: _Slot, dtype: torch.dtype) -> nn.Parameter:
    """A parameter of a shape and dtype alone: whoever computes with it fails, and does so loudly."""
    empty = torch.empty(tuple(slot.original.shape), dtype=dtype, device="meta")
    return nn.Parameter(empty, requires_grad=False)


def _placeholder(slot: _Slot, shape: tuple[int, ...]) -> Tensor:
    if tuple(slot.original.shape) == shape:
        return slot.original
    empty = torch.empty(shape, dtype=slot.original.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=False) if slot.is_parameter else empty


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """A module's parameters, its buffers, and which buffers are computed and not saved.

    Private to PyTorch, whose public ways check and copy what needs neither, at a hundred times the cost.
    """
    return (
        module._parameters,  # pyright: ignore[reportPrivateUsage]
        module._buffers,  # pyright: ignore[reportPrivateUsage]
        module._non_persistent_buffers_set,  # pyright: ignore[reportPrivateUsage]
    )
