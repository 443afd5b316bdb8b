"""LoRA adapters (Hu et al., arXiv:2106.09685), a different one per request, in one batch.

peft     reads adapters in PEFT's format, with a cache in host memory
slots    the types of an adapter's slot in a pool
pool     the adapters of the served model on its device: the base class
ranges   the pool on a CPU: one matrix per layer, a range of ranks per adapter
paged    the pool on a GPU: pages of ranks
plan     the rows of a step that each adapter changes
tiles    the products of a step on devices without kernels
targets  the layers of a model that can have adapters
hook     replaces the `forward` of such a layer
manager  loads and drops adapters for an engine
"""
