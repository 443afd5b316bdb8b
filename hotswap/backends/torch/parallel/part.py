"""The part of a model that one rank has: which tensors, in which shapes, and how its modules run."""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.backends.stores.slicing import Shape, cuts
from hotswap.backends.torch.modeling import Skeleton
from hotswap.backends.torch.parallel import plan, stages
from hotswap.backends.torch.parallel.places import Place

__all__ = ["Part", "part_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of a model.

    Attributes:
        place: The rank.
        shapes: The tensors that it needs, in the shapes of its part.
        whole: All tensors, in their own shapes.
        layers: Its layers.
    """

    place: Place
    shapes: dict[str, Shape]
    whole: dict[str, Shape]
    layers: range


def part_of(skeleton: Skeleton, place: Place) -> Part:
    """Return what a rank has of the model of a skeleton.

    Raises:
        UnsupportedModel: there is no tensor-parallel plan for it, or its layers cannot be told apart.
        ConfigError: it has fewer layers than there are stages.
    """
    whole = skeleton.shapes
    tp = place.grid.tp
    cut = cuts(skeleton.module, whole, tp)
    if tp > 1:
        plan.check_plan(skeleton.module)
    is_needed = stages.needed(skeleton.module, skeleton.num_layers, place)
    shapes = {
        name: cut[name].shape(shape, place.part, tp) if name in cut else shape
        for name, shape in whole.items()
        if is_needed(name)
    }
    return Part(place, shapes, whole, place.layers(skeleton.num_layers))
