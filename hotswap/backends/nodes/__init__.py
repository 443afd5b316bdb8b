"""Stores of weights on several nodes as one: each node has its tiers, and the view tells whose they are."""

from __future__ import annotations

from hotswap.backends.nodes.stores import NodeStores

__all__ = ["NodeStores"]
