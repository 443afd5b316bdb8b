"""Skeletons: a model's modules without weights, built once per architecture and bound to any such model."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hotswap.backends.torch import attention
from hotswap.backends.torch.adapters.targets import Target
from hotswap.backends.torch.config_text import canonical, parse_config, row_wise_rope
from hotswap.backends.torch.default_dtype import own_default_dtype
from hotswap.backends.torch.experts import choose_experts, expert_layers
from hotswap.backends.torch.fp8_linear import Fp8Linear, QuantizedWeights, attach, detach
from hotswap.backends.torch.fused import Fused, fuse
from hotswap.backends.torch.kv import LayerShape
from hotswap.backends.torch.linear import LinearLayer, linear_layers
from hotswap.backends.torch.long_rope import choose_factors
from hotswap.backends.torch.own_attention import has_own_attention, replace_attention, set_implementation
from hotswap.backends.torch.recurrent.mixers import Mixer
from hotswap.backends.torch.recurrent.mixers import attach as attach_mixers
from hotswap.backends.torch.row_positions import tell_positions
from hotswap.backends.torch.weights import Views
from hotswap.errors import ShardCorrupt, UnsupportedModel
from hotswap.model import TensorSpec

__all__ = ["Skeleton", "SkeletonCache", "main_dtype"]

# Held while a method of `nn.Module` is replaced to make meta parameters: the class is shared by all threads.
_PATCH = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Slot:
    """The location of a named tensor in a skeleton: `holder[key]`, a dict of one of its modules."""

    name: str
    holder: dict[str, Any]
    key: str
    original: Tensor

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.original, nn.Parameter)


class Skeleton:
    """The modules of one architecture on a device, without weights until `bind`.

    Parameters are on the meta device; buffers, such as rotary frequencies, are real. Binding replaces the
    parameters with views of a flat buffer, in microseconds per tensor for any size.

    Args:
        config_text: The `config.json` of the model.
        device: The device of the buffers.

    Attributes:
        key: The canonical config, equal for equal architectures.
        config: transformers' config.
        module: The model.
        dtype: The dtype that the bound model computes in.
        targets: The layers that can have adapters, by device and compute format, as far as requested.
        linears: The replaced linear layers, on a CPU.
        mixers: The layers that keep recurrent states; none if there are some of an unknown kind.
        long_rope: When RoPE factors for long texts are taken; `None` if factors depend on no length.
        num_layers: The number of layers.
        vocabulary: The number of token ids.
        max_positions: The maximum context in tokens; `None` if the config has none.
    """

    def __init__(self, config_text: str, device: torch.device) -> None:
        self.key = canonical(config_text)
        self.config = parse_config(config_text)
        with _refusing(self.config.model_type):
            self.module = _build(self.config, device)
            self.dtype = torch.float32
            self._slots = tuple(_slots(self.module))
            self._experts = expert_layers(self.module)
            self.mixers: tuple[Mixer, ...] = attach_mixers(self.module)
            self._multiplying = tuple(_multiplying(self.module, self.mixers))
            self.targets: dict[str, Mapping[str, Target]] = {}
            self._fp8_linears: tuple[Fp8Linear, ...] = ()
            on_cpu = device.type == "cpu"
            self.linears: tuple[LinearLayer, ...] = linear_layers(self.module) if on_cpu else ()
            replace_attention(self.module)
            self._fused: tuple[Fused, ...] = fuse(self.module) if on_cpu else ()
            self._fused += tell_positions(self.module)
            chosen, self.long_rope = choose_factors(self.module)
            self._fused += chosen
            if self.long_rope is None and (rope := row_wise_rope(config_text)):
                raise UnsupportedModel(
                    f"The {self.config.model_type!r} model uses {rope!r} RoPE in code of its "
                    "own, whose factors depend on the other requests of a batch; serve it with another "
                    "engine, or remove the scaling from its config."
                )
            text_config = self.config.get_text_config()
            self.num_layers = int(getattr(text_config, "num_hidden_layers", 0))
            self.vocabulary = int(self.module.get_input_embeddings().num_embeddings)
            positions: object = getattr(text_config, "max_position_embeddings", None)
            self.max_positions = None if positions is None else int(cast("int", positions))
            if (self.max_positions or 0) < 0:
                raise UnsupportedModel(
                    f"The config of the {self.config.model_type!r} model has max_position_embeddings "
                    f"{self.max_positions}; fetch it again."
                )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the tensors that `bind` needs."""
        return {slot.name: tuple(slot.original.shape) for slot in self._slots}

    @property
    def num_logits(self) -> int:
        """The number of logits of a token; in some models greater than the number of token ids."""
        head = self.module.get_output_embeddings()
        return self.vocabulary if head is None else int(head.weight.shape[0])

    def narrow(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Restrict `bind` to the named tensors in these shapes, those of one rank of several."""
        self._slots = tuple(
            replace(slot, original=_placeholder(slot, shapes[slot.name]))
            for slot in self._slots
            if slot.name in shapes
        )

    def bind(
        self, flat: Tensor, specs: Sequence[TensorSpec], quantized: QuantizedWeights | None = None
    ) -> None:
        """Make every parameter and persistent buffer a view of `flat`, except weights that stay quantized.

        Those are replaced by placeholders without values, and their layers compute from the FP8 values.

        Args:
            flat: uint8, the flat buffer.
            specs: The tensors in it.
            quantized: The weights that stay quantized; `None` if there are none.

        Raises:
            ShardCorrupt: a tensor is missing, or does not have the shape of the architecture's.
        """
        self.dtype = self.config.dtype = main_dtype(specs) if quantized is None else quantized.dtype
        known = {spec.name: spec for spec in specs}
        views, made = Views(flat), dict[int, Tensor]()
        kept = frozenset[str]() if quantized is None else quantized.names
        for slot in self._slots:
            if slot.name in kept:
                slot.holder[slot.key] = _without_values(slot, self.dtype)
                continue
            spec = known.get(slot.name)
            if spec is None or spec.shape != tuple(slot.original.shape):
                found = "missing" if spec is None else f"of shape {list(spec.shape)}"
                raise ShardCorrupt(
                    f"Tensor {slot.name!r} is {found}, the architecture needs {list(slot.original.shape)}; "
                    "convert the model again."
                )
            if spec.offset_bytes not in made:
                view = views.at(spec)
                parameter = nn.Parameter(view, requires_grad=False) if slot.is_parameter else view
                made[spec.offset_bytes] = parameter
            slot.holder[slot.key] = made[spec.offset_bytes]
        if quantized is not None:
            self._fp8_linears = attach(self.module, quantized, known, views)
        choose_experts(self.module, self._experts)

    @property
    def fp8_linears(self) -> tuple[Fp8Linear, ...]:
        """The linear layers whose weights stay quantized."""
        return self._fp8_linears

    def unbind(self) -> None:
        """Drop all references to the flat buffer."""
        detach(self._fp8_linears)
        self._fp8_linears = ()
        for slot in self._slots:
            slot.holder[slot.key] = slot.original

    @property
    def linear_only(self) -> bool:
        """Whether all bound matrices belong to linear layers with a batch-invariant kernel.

        Other matrices, such as stacked expert weights, are multiplied by the model's own code.
        """
        packable = {id(layer.stored) for layer in self.linears if layer.packable}
        packable |= {id(linear.layer.weight) for linear in self._fp8_linears if linear.is_invariant}
        return all(id(table[key]) in packable for table, key in self._multiplying)

    @contextmanager
    def eager(self) -> Generator[None]:
        """Run the model's own eager attention and its own unfused operations within the block."""
        set_implementation(self.module, "eager")
        for fused in self._fused:
            fused.detach()
        try:
            yield
        finally:
            for fused in self._fused:
                fused.attach()
            set_implementation(self.module, attention.IMPLEMENTATION)


@dataclass(slots=True)
class SkeletonCache:
    """A cache of skeletons and of preflight results, which engines of a process may share. Thread-safe.

    A skeleton is used by one model at a time.

    Attributes:
        max_idle: The maximum number of unused skeletons that are kept, least recently used first to go.
            Default: 8.
        verified: The KV cache entries of a token, by architecture and compute format, for architectures that
            passed their preflight.
        step_bytes: The memory of the largest step on a GPU, by the same keys and the limits of a step.
        unadaptable: The linear layers that cannot have adapters, by the same keys.
    """

    max_idle: int = 8
    verified: dict[tuple[str, str], tuple[LayerShape, ...]] = field(
        default_factory=dict[tuple[str, str], tuple[LayerShape, ...]]
    )
    step_bytes: dict[object, int] = field(default_factory=dict[object, int])
    unadaptable: dict[tuple[str, str], set[str]] = field(default_factory=dict[tuple[str, str], set[str]])
    _idle: OrderedDict[int, tuple[str, str, Skeleton]] = field(
        default_factory=OrderedDict[int, tuple[str, str, Skeleton]]
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def borrow(self, config_text: str, device: torch.device) -> Skeleton:
        """Return an unused skeleton for a config, or build one.

        Raises:
            UnsupportedModel: transformers does not have the architecture, or it cannot be served exactly.
            ShardCorrupt: the config is not a JSON object.
        """
        wanted = (canonical(config_text), str(device))
        with self._lock:
            for ident, (*key, skeleton) in self._idle.items():
                if tuple(key) == wanted:
                    del self._idle[ident]
                    return skeleton
        return Skeleton(config_text, device)

    def give_back(self, skeleton: Skeleton, device: torch.device) -> None:
        """Return a borrowed skeleton; it is unbound from its weights."""
        skeleton.unbind()
        with self._lock:
            self._idle[id(skeleton)] = (skeleton.key, str(device), skeleton)
            while len(self._idle) > self.max_idle:
                self._idle.popitem(last=False)


def main_dtype(specs: Sequence[TensorSpec]) -> torch.dtype:
    """Return the dtype of most weight bytes."""
    sizes: dict[str, int] = {}
    for spec in specs:
        sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.size_bytes
    return cast("torch.dtype", getattr(torch, max(sizes, key=lambda name: sizes[name], default="float32")))


def _build(config: Any, device: torch.device) -> Any:
    attention.register()
    models: Any = AutoModelForCausalLM
    with _meta_parameters(), own_default_dtype():
        # Parameters get their dtype when they are bound; buffers are computed as in a model of fp32.
        options = {"dtype": torch.float32, "trust_remote_code": False}
        try:
            module: Any = models.from_config(config, attn_implementation=attention.IMPLEMENTATION, **options)
        except KeyError:  # a model that chooses classes by the implementation
            module = models.from_config(config, attn_implementation="eager", **options)
            if not has_own_attention(module):
                raise
            set_implementation(module, attention.IMPLEMENTATION)
    module.tie_weights()
    module.eval().requires_grad_(False)
    for holder in cast("Iterator[nn.Module]", module.modules()):
        _, buffers, _ = _tables(holder)
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = buffer.to(device)
    return module


@contextmanager
def _refusing(kind: str) -> Generator[None]:
    """Raise errors of modules as `UnsupportedModel`: sizes that are 0, negative or huge lead to any error."""
    try:
        yield
    except UnsupportedModel:
        raise
    except Exception as exc:
        raise UnsupportedModel(
            f"transformers cannot build a causal language model of type {kind!r} ({exc}); fetch its config "
            "again, or serve it with another engine."
        ) from exc


@contextmanager
def _meta_parameters() -> Generator[None]:
    """Put the parameters that this thread registers on the meta device; buffers are computed as usual.

    `torch.device("meta")` would leave the buffers without values too.
    """
    thread = threading.get_ident()
    with _PATCH:
        original = nn.Module.register_parameter

        def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            original(module, name, param)
            if param is not None and not param.is_meta and threading.get_ident() == thread:
                parameters, _, _ = _tables(module)
                parameters[name] = nn.Parameter(param.detach().to("meta"), requires_grad=False)

        nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]  # undone below
        try:
            yield
        finally:
            nn.Module.register_parameter = original  # type: ignore[method-assign]  # as it was


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


def _multiplying(module: Any, mixers: Sequence[Mixer]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the locations of all matrices but embeddings and weights of kernels.

    Embeddings are looked up, and the kernels of recurrent layers sum their products in a fixed order.
    """
    by_kernel = {id(mixer.module) for mixer in mixers}
    by_kernel |= {id(p) for m in mixers for p in m.module.children() if isinstance(p, nn.Conv1d)}
    holders: Iterator[nn.Module] = module.modules()
    for holder in holders:
        parameters, _, _ = _tables(holder)
        for key, value in parameters.items():
            by_other = isinstance(holder, nn.Embedding) or id(holder) in by_kernel
            if value is not None and value.ndim > 1 and not by_other:
                yield parameters, key


def _without_values(slot: _Slot, dtype: torch.dtype) -> nn.Parameter:
    """Return a meta parameter with the slot's shape: a computation with it raises an error."""
    empty = torch.empty(tuple(slot.original.shape), dtype=dtype, device="meta")
    return nn.Parameter(empty, requires_grad=False)


def _placeholder(slot: _Slot, shape: tuple[int, ...]) -> Tensor:
    if tuple(slot.original.shape) == shape:
        return slot.original
    empty = torch.empty(shape, dtype=slot.original.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=False) if slot.is_parameter else empty


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """Return a module's parameters, its buffers, and the names of its non-persistent buffers.

    These attributes are private to PyTorch; its public methods check and copy, at a hundred times the cost.
    """
    return (
        module._parameters,  # pyright: ignore[reportPrivateUsage]
        module._buffers,  # pyright: ignore[reportPrivateUsage]
        module._non_persistent_buffers_set,  # pyright: ignore[reportPrivateUsage]
    )
