"""The kernel that is launched to try whether others can be, interpreted; run by `test_interpreted`."""

from __future__ import annotations

import torch

from hotswap.kernels.trial import launch


def test_what_is_launched_to_try_does_what_it_should() -> None:
    launch(torch.device("cpu"))
