"""The part of a model on one rank: its tensors, their sharded shapes, and its layers."""

from __future__ import annotations

from dataclasses import dataclass

from hotswap.backends.stores.slicing import Shape, cuts
from hotswap.backends.torch.modeling import Skeleton
from hotswap.backends.torch.parallel import plan, stages
from hotswap.backends.torch.parallel.grid import RankPosition

__all__ = ["Part", "part_of"]


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a model on one rank.

    Attributes:
        position: The position of the rank.
        shapes: The rank's tensors, with their sharded shapes.
        whole: All tensors of the model, with their full shapes.
        layers: The rank's layers.
    """

    position: RankPosition
    shapes: dict[str, Shape]
    whole: dict[str, Shape]
    layers: range


def part_of(skeleton: Skeleton, position: RankPosition) -> Part:
    """Return the part of a skeleton's model on one rank.

    Raises:
        UnsupportedModel: the model has no tensor-parallel plan, or no list of its layers.
        ConfigError: it has fewer layers than there are stages.
    """
    whole = skeleton.shapes
    tp = position.grid.tp
    cut = cuts(skeleton.module, whole, tp)
    if tp > 1:
        plan.check_plan(skeleton.module)
    is_needed = stages.needed(skeleton.module, skeleton.num_layers, position)
    shapes = {
        name: cut[name].shape(shape, position.part, tp) if name in cut else shape
        for name, shape in whole.items()
        if is_needed(name)
    }
    return Part(position, shapes, whole, position.layers(skeleton.num_layers))
