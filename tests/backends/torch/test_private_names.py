"""The private names of numba, torch and transformers that hotswap relies on: all of them, and that they hold.

A new version of a library fails here, by the name, and not in a load of a user.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import hotswap
from hotswap.backends.torch.recurrent.functions import CONVOLUTION, RECURRENCES
from tests.backends.torch.zoo import CONFIGS, make_model

ROOT = Path(hotswap.__file__).parent
# What vLLM keeps private has a module of its own: tests/backends/vllm/test_names.py.
ELSEWHERE = ("backends/vllm/",)
LIBRARIES = ("llvmlite", "numba", "torch", "transformers")


def module_keeps_what_it_has_in_dicts() -> None:
    module = nn.Linear(2, 3)
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("computed", torch.zeros(1), persistent=False)
    assert module._parameters.keys() == {"weight", "bias"}
    assert module._buffers.keys() == {"kept", "computed"}
    assert module._non_persistent_buffers_set == {"computed"}
    module._parameters["weight"] = nn.Parameter(torch.ones(3, 2))
    assert module.weight.sum() == 6, "a change of the dict is a change of the module"


def parameters_are_registered_by_the_method_of_the_class() -> None:
    seen: list[str] = []
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        seen.append(name)
        original(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        nn.Linear(2, 3)
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
    assert seen == ["weight", "bias"]


def onednn_multiplies_by_packed_weights() -> None:
    operators: Any = torch.ops.mkldnn
    weight, rows = torch.randn(32, 16), torch.randn(4, 16)
    packed = operators._reorder_linear_weight(weight, 4)
    out = operators._linear_pointwise(rows, packed, None, "none", [], "")
    assert torch.allclose(out, rows @ weight.t(), atol=1e-5)


def grouped_products_can_be_replaced() -> None:
    seen: list[Any] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    untyped: Any = torch
    rows, weight = torch.randn(4, 8), torch.randn(2, 8, 16)
    ends = torch.tensor([1, 4], dtype=torch.int32)
    with Watch():
        out = untyped.nn.functional.grouped_mm(rows, weight, offs=ends)
    assert untyped._grouped_mm in seen
    assert torch.allclose(out, torch.cat([rows[:1] @ weight[0], rows[1:] @ weight[1]]), atol=1e-5)


def storages_have_weak_references() -> None:
    references: Any = import_module("torch.multiprocessing.reductions").StorageWeakRef
    tensor = torch.zeros(4)
    reference = references(tensor.untyped_storage())
    assert not reference.expired()
    assert reference == references(tensor.untyped_storage())
    del tensor
    assert reference.expired()


def ranks_find_each_other_by_stores() -> None:
    stores: Any = import_module("torch._C._distributed_c10d")
    assert issubclass(stores.FileStore, stores.Store)
    assert issubclass(stores.TCPStore, stores.Store)


def numba_caches_by_classes_that_can_be_derived() -> None:
    caching: Any = import_module("numba.core.caching")
    cached = caching.FunctionCache
    assert issubclass(cached._impl_class, caching.CompileResultCacheImpl)
    assert list(inspect.signature(cached._index_key).parameters) == ["self", "sig", "codegen"]
    assert list(inspect.signature(cached.load_overload).parameters) == ["self", "sig", "target_context"]
    assert list(inspect.signature(cached.save_overload).parameters) == ["self", "sig", "data"]
    assert caching.CompileResultCacheImpl._locator_classes
    assert {"cache_path", "filename_base", "source_stamp"} <= inspect.signature(
        caching.IndexDataCacheFile
    ).parameters.keys()
    assert "_cache_file" in inspect.getsource(caching._Cache) + inspect.getsource(caching.Cache)
    for name in ("NullCache", "UserProvidedCacheLocator", "UserWideCacheLocator"):
        assert hasattr(caching, name)


def numba_compiles_for_c() -> None:
    kind: Any = import_module("numba.core.ccallback").CFunc
    assert {"locals", "options"} <= inspect.signature(kind).parameters.keys()
    assert "self._cache" in inspect.getsource(kind)
    assert "self._cache" in inspect.getsource(import_module("numba.core.dispatcher"))


def numba_tells_the_processor() -> None:
    registry: Any = import_module("numba.core.registry")
    config: Any = import_module("numba.core.config")
    assert registry.cpu_target.target_context.codegen().magic_tuple()
    assert hasattr(config, "CPU_NAME")
    assert hasattr(config, "CPU_FEATURES")
    assert import_module("numba.core.sigutils").normalize_signature
    assert import_module("numba.core.cgutils").get_or_insert_function


def llvmlite_builds_instructions() -> None:
    ir: Any = import_module("llvmlite.ir")
    assert str(ir.VectorType(ir.FloatType(), 16)) == "<16 x float>"
    assert callable(ir.FloatType()._to_string)


def checkpoints_are_converted_piece_by_piece() -> None:
    model: Any = make_model("llama")
    assert isinstance(model._keys_to_ignore_on_load_missing or set(), (set, list))
    assert isinstance(model._get_dtype_plan(torch.float32), dict)
    assert callable(import_module("transformers.conversion_mapping").get_model_conversion_mapping)
    import_module("transformers.core_model_loading")


def experts_have_several_implementations() -> None:
    model: Any = make_model("mixtral")
    experts = [part for part in model.modules() if hasattr(part, "has_gate")]
    assert len(experts) == model.config.num_hidden_layers
    assert all(hasattr(part, "is_transposed") for part in experts)
    for name in ("eager", "grouped_mm"):
        model.set_experts_implementation(name)
        assert model.config._experts_implementation == name


def attention_and_masks_can_be_registered() -> None:
    transformers: Any = import_module("transformers")
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        assert callable(interface.register)
    assert "mask_function" in inspect.getsource(import_module("transformers.masking_utils"))
    assert callable(import_module("transformers.models.llama.modeling_llama").apply_rotary_pos_emb)
    assert import_module("transformers.pytorch_utils").Conv1D(4, 3).weight.shape == (3, 4), "transposed"
    assert transformers.CONFIG_MAPPING["llama"] is type(CONFIGS["llama"]())


def recurrent_layers_call_functions_by_these_names() -> None:
    assert import_module("transformers.activations").ACT2FN["silu"](torch.zeros(1)) == 0
    mixers = {
        "lfm2.modeling_lfm2.Lfm2ShortConv": set[str](),
        "qwen3_next.modeling_qwen3_next.Qwen3NextGatedDeltaNet": {"torch_chunk_gated_delta_rule"},
        "kimi_linear.modeling_kimi_linear.KimiLinearDeltaAttention": {"chunk_kimi_delta_attention"},
        "bamba.modeling_bamba.BambaMixer": {"mamba2_chunk_scan"},
        "jamba.modeling_jamba.JambaMambaMixer": {"mamba_selective_scan"},
    }
    for path, recurrences in mixers.items():
        module, _, name = path.rpartition(".")
        forward: Any = inspect.unwrap(getattr(import_module(f"transformers.models.{module}"), name).forward)
        assert {CONVOLUTION, "update_conv_state", *recurrences} <= set(forward.__code__.co_names), name
        assert set(RECURRENCES) & set(forward.__code__.co_names) == recurrences, name


def models_with_attention_of_their_own_have_these_parts() -> None:
    parts = {
        "bloom.modeling_bloom.BloomAttention": {"_reshape"},
        "codegen.modeling_codegen.CodeGenAttention": {"_attn"},
        "falcon.modeling_falcon.FalconAttention": {"_split_heads"},
        "gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention": {"_attn"},
        "gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": {"_attn"},
        "gptj.modeling_gptj.GPTJAttention": {"_attn"},
        "mpt.modeling_mpt.MptAttention": set[str](),
        "openai.modeling_openai.Attention": {"_attn"},
    }
    for path, methods in parts.items():
        module, _, name = path.rpartition(".")
        kind = getattr(import_module(f"transformers.models.{module}"), name)
        calls_interface = "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(kind.forward).__code__.co_names
        assert calls_interface or methods <= vars(kind).keys(), name
    config: Any = CONFIGS["llama"]()
    config._attn_implementation_internal = "eager"
    assert config._attn_implementation == "eager"


# By the private names, or the modules without a promise, that each check covers.
CHECKS: dict[Callable[[], None], tuple[str, ...]] = {
    module_keeps_what_it_has_in_dicts: ("_buffers", "_non_persistent_buffers_set", "_parameters"),
    parameters_are_registered_by_the_method_of_the_class: (),
    onednn_multiplies_by_packed_weights: ("_linear_pointwise", "_reorder_linear_weight"),
    grouped_products_can_be_replaced: ("_grouped_mm",),
    storages_have_weak_references: ("torch.multiprocessing.reductions",),
    ranks_find_each_other_by_stores: ("torch._C._distributed_c10d",),
    numba_caches_by_classes_that_can_be_derived: ("_cache", "numba.core.caching"),
    numba_compiles_for_c: ("numba.core.ccallback",),
    numba_tells_the_processor: (
        *("numba.core.cgutils", "numba.core.config", "numba.core.registry", "numba.core.sigutils"),
    ),
    llvmlite_builds_instructions: ("llvmlite.ir",),
    checkpoints_are_converted_piece_by_piece: (
        *("_get_dtype_plan", "_keys_to_ignore_on_load_missing"),
        *("transformers.conversion_mapping", "transformers.core_model_loading"),
    ),
    experts_have_several_implementations: (),
    attention_and_masks_can_be_registered: ("transformers.pytorch_utils",),
    recurrent_layers_call_functions_by_these_names: ("transformers.activations",),
    models_with_attention_of_their_own_have_these_parts: (
        *("_attn", "_attn_implementation_internal", "_reshape", "_split_heads"),
    ),
}
# Documented, or of Python itself.
PUBLIC = {"_exit", "numba.extending", "torch.nn", "torch.overrides", "torch.distributed"}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_what_is_relied_on_holds(check: Callable[[], None]) -> None:
    check()


def test_every_private_name_that_is_relied_on_is_checked() -> None:
    listed = {name for names in CHECKS.values() for name in names}
    found = _foreign_names()
    assert found - PUBLIC - listed == set(), "check these here too"
    assert listed - found - _often_own() == set(), "these are no longer used"


def _often_own() -> set[str]:
    """Names that classes of hotswap have too, so that a scan cannot tell them apart."""
    return {"_buffers", "_cache", "_grouped_mm", "_parameters"}


@cache
def _foreign_names() -> set[str]:
    """Return the private attributes that hotswap defines nowhere, and the modules that it imports."""
    own, used, modules = set[str](), set[str](), set[str]()
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).as_posix().startswith(ELSEWHERE):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr[1:2] != "_":
                is_own = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
                (own if is_own else used).add(node.attr)
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules |= _modules_of(node.module, [name.name for name in node.names])
    return (used - own) | modules


def _modules_of(module: str, names: list[str]) -> set[str]:
    """Return the modules within a library from which something is imported."""
    library, *rest = module.split(".")
    if library not in LIBRARIES:
        return set()
    if rest and module != "numba.core":
        return {module}
    return {f"{module}.{name}" for name in names if rest or name in ("ir", "core_model_loading")}
