"""The program that finds out whether vLLM can compute with a checkpoint's kind of quantization.

Run as a file, it imports nothing of hotswap, and no crash of a kernel ends more than itself. It reads one
line of JSON, vLLM's arguments of a model whose config lies in a directory, and writes one: why vLLM cannot
serve it, or `null`. Layers of the kind are made, without the model's weights; on a CPU they also compute.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

_SIZE, _ROWS, _EXPERTS = 512, 2, 4


def main() -> None:
    """Answer one question."""
    given = json.loads(sys.stdin.readline())
    sys.stdout.write(json.dumps({"refusal": refusal(given)}) + "\n")


def refusal(given: dict[str, Any]) -> str | None:
    """Return why vLLM cannot serve a model, `None` if it can or if that is not known."""
    try:
        config: Any = _of("vllm.engine.arg_utils").AsyncEngineArgs(**given).create_engine_config()
    except Exception as exc:
        return _brief(exc)
    with _of("vllm.config").set_current_vllm_config(config):
        _join_alone()
        for layer in _layers(config, None):  # an error here is of this program, not of the kind
            _compute(layer, config)
        try:
            for layer in _layers(config, config.quant_config):
                _compute(layer, config)
        except Exception as exc:
            return _brief(exc)
    return None


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500].removesuffix(".") + "."


def _of(module: str) -> Any:
    """Import a module of vLLM, which has no types."""
    return import_module(module)


def _join_alone() -> None:
    """Be the only rank, which layers ask for."""
    state = _of("vllm.distributed.parallel_state")
    with tempfile.TemporaryDirectory() as directory:
        meeting = f"file://{Path(directory) / 'ranks'}"
        state.init_distributed_environment(1, 0, meeting, 0, "gloo")
        state.ensure_model_parallel_initialized(1, 1)


def _layers(config: Any, quantization: Any) -> Iterator[Any]:
    """Make a layer with one weight, one of two that are fused, and one of experts if the model has such."""
    config.compilation_config.static_forward_context.clear()  # where layers of experts are known by name
    model: Any = config.model_config
    given = {"params_dtype": model.dtype, "quant_config": quantization}
    linear = _of("vllm.model_executor.layers.linear")
    alone = {"bias": False, "disable_tp": True}
    place = "model.layers.0.mlp."
    yield linear.ReplicatedLinear(_SIZE, _SIZE, prefix=f"{place}down_proj", **given, **alone)
    sizes = [_SIZE, _SIZE]
    yield linear.MergedColumnParallelLinear(_SIZE, sizes, prefix=f"{place}gate_up_proj", **given, **alone)
    if model.get_num_experts():
        yield _of("vllm.model_executor.layers.fused_moe.layer").FusedMoEFactory(
            num_experts=_EXPERTS,
            top_k=2,
            hidden_size=_SIZE,
            intermediate_size=_SIZE,
            prefix=f"{place}experts",
            **given,
        )


@torch.no_grad()
def _compute(layer: Any, config: Any) -> None:
    if not _of("vllm.platforms").current_platform.is_cpu():
        return  # a GPU's kernel was chosen when the layer was made; its memory is others'
    has_experts = hasattr(layer, "routed_experts")
    weights = layer.routed_experts if has_experts else layer
    for parameter in weights.parameters():
        if parameter.is_floating_point():  # scales that differ, as those of fused weights do
            parameter.copy_((torch.arange(parameter.numel()) % 2 + 1).view(parameter.shape))
        else:
            parameter.zero_()
    weights.quant_method.process_weights_after_loading(weights)
    dtype = config.model_config.dtype
    rows, routes = torch.zeros(_ROWS, _SIZE, dtype=dtype), torch.zeros(_ROWS, _EXPERTS, dtype=dtype)
    with _of("vllm.forward_context").set_forward_context(None, config):
        layer(*((rows, routes) if has_experts else (rows,)))


if __name__ == "__main__":
    main()
