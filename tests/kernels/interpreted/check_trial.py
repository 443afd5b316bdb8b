"""The trial kernel of `targets.runs_triton`, interpreted; run by `test_interpreted`."""

from __future__ import annotations

import torch

from hotswap.kernels.trial import launch


def test_the_trial_kernel_can_be_launched() -> None:
    launch(torch.device("cpu"))
