"""Low-rank adapters of single requests (Hu et al., LoRA, arXiv:2106.09685), mixed in one batch.

`peft` reads them; `pool` holds those of the served model at `places`, on a CPU in one matrix a layer
(`ranges`), on a GPU in pages (`paged`); `plan` says which rows of a step go through which part of it, `tiles`
how without kernels, `targets` which layers can have any, `hook` is what stands in for them, and `holder` is
what the engine asks.
"""
