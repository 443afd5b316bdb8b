"""Low-rank adapters of single requests (Hu et al., LoRA, arXiv:2106.09685), mixed in one batch.

`peft` reads them; `pool` holds those of the served model, on a CPU in one matrix a layer (`tiled`), on a GPU
in pages (`paged`); `plan` says which rows of a step go through which part of it, `targets` which layers can
have any, `hook` is what stands in for them, and `holder` is what the engine asks.
"""
