"""Recurrent state per request, for models with convolutions, linear attention or state spaces.

    states     the tensors of a state, with a slot for each running request, and the slots of one step
    snapshots  which slots have the states after which prefixes, for requests that begin alike
    mixers     finds the layers of a model that keep states, and replaces the functions by which they do
    functions  those functions for a step, by hotswap's kernels on a CPU
    groups     the same on other devices, by the model's own functions, for requests of equal numbers of rows

A mixer computes its projections for the whole row of a step, as any layer. Only what continues a state is
computed per request: the causal convolution, and the recurrence. The batcher owns the slots: a request has
one from its admission until it ends or is preempted, and its state begins at zero when its first token is
computed, or as a snapshot.
"""

from __future__ import annotations

from hotswap.backends.torch.recurrent.snapshots import SnapshotPool, StateCopy
from hotswap.backends.torch.recurrent.states import StatePool, StateShape, StepStates

__all__ = ["SnapshotPool", "StateCopy", "StatePool", "StateShape", "StepStates"]
