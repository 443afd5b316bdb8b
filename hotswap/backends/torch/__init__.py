"""An engine in this process, over PyTorch and transformers: any causal language model, exactly."""

from __future__ import annotations
