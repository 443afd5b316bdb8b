"""What an engine says of a model that its store keeps in a layout that the engine cannot read."""

from __future__ import annotations

from typing import Protocol

from hotswap.errors import UnsupportedModel
from hotswap.model import Layout
from hotswap.request import ModelId

__all__ = ["require_gguf", "require_modules", "require_tensors"]


class _Kept(Protocol):
    """How a store keeps a model: a `ModelCard` tells it, and a `Manifest`."""

    @property
    def layout(self) -> Layout: ...

    @property
    def is_gguf(self) -> bool: ...


def require_modules(model: ModelId, kept: _Kept) -> None:
    """Raise `UnsupportedModel` unless a model is kept by modules, as transformers has them."""
    require_tensors(model, kept)
    if kept.layout != "modules":
        raise UnsupportedModel(
            f"Model {model!r} is kept as its checkpoint is, and a TorchEngine reads models by modules; "
            "import it with `Model(..., layout='modules')` or `hotswap store add --layout modules --replace"
            "`, or serve it with a VllmEngine."
        )


def require_gguf(engine: str, model: ModelId, kept: _Kept) -> None:
    """Raise `UnsupportedModel` of any model but a GGUF model."""
    if not kept.is_gguf:
        kind = "the layout 'modules'" if kept.layout == "modules" else "safetensors files"
        raise UnsupportedModel(
            f"Engine {engine!r} serves GGUF files, and the store has {model!r} as {kind}; import a GGUF file "
            "of it under an id of its own, or serve it by another kind of engine."
        )


def require_tensors(model: ModelId, kept: _Kept) -> None:
    """Raise `UnsupportedModel` of a GGUF model."""
    if kept.is_gguf:
        raise UnsupportedModel(
            f"Model {model!r} is a GGUF model, which engines of llama.cpp read; serve it with a "
            "LlamaCppEngine, or import its checkpoint as safetensors."
        )
