"""Low-rank adapters of single requests (Hu et al., LoRA, arXiv:2106.09685), mixed in one batch.

`peft` reads them, `pool` holds those of the served model in one matrix a layer, `plan` says which rows of a
step go through which part of it, `targets` which layers can have any, and `holder` is what the engine asks.
"""
