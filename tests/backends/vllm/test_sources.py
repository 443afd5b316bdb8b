"""What hotswap relies on is in the sources of vLLM: the installed ones, and the newest, which are not run.

No signature tells that a class attribute has become a method, or that a base class calls an override by
other names. So what hotswap overrides is compared with its base, too.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from hotswap.backends.vllm import names, params
from hotswap.sampling import MAX_ENTRIES
from tests.backends.vllm.sources import Found, Function, Gone, Sources, clash, is_abstract, kind

_ROOT = Path(__file__).parents[3]
_NEWEST = _ROOT / ".cache" / "vllm-sources"
_OURS = _ROOT / "hotswap" / "backends" / "vllm"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"

# Our classes by file, and vLLM's that they are subclasses of.
_OVERRIDES = (
    (
        "inside/connector.py",
        "HotswapConnector",
        (f"{_CONNECTOR}:KVConnectorBase_V1", f"{_CONNECTOR}:SupportsHMA"),
    ),
    ("inside/sampling.py", "HotswapSampler", ("vllm.v1.sample.sampler:Sampler",)),
    ("inside/sampling.py", "Forbid", ("vllm.v1.sample.logits_processor:LogitsProcessor",)),
    ("inside/sampling.py", "Cut", ("vllm.v1.sample.logits_processor:LogitsProcessor",)),
    ("inside/worker.py", "HotswapLoader", ("vllm.model_executor.model_loader.base_loader:BaseModelLoader",)),
    ("stats.py", "Logger", ("vllm.v1.metrics.loggers:PrometheusStatLogger",)),
)
# Arguments of their own, since other code makes them.
_OWN_CONSTRUCTORS = {"HotswapSampler", "Forbid", "Cut"}

# Attributes of vLLM's objects that are read or set, by class.
_ATTRIBUTES = {
    "vllm.v1.engine.async_llm:AsyncLLM": ("engine_core", "output_handler", "vllm_config", "errored"),
    "vllm.v1.engine.core_client:MPClient": ("resources",),
    "vllm.v1.engine.core_client:BackgroundResources": ("engine_manager", "engine_dead"),
    "vllm.v1.engine.core:EngineCore": ("scheduler", "model_executor"),
    "vllm.v1.core.sched.scheduler:Scheduler": (
        *("connector", "requests", "running", "kv_cache_manager", "kv_cache_config"),
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": ("block_pool",),
    "vllm.v1.core.block_pool:BlockPool": ("enable_caching",),
    "vllm.v1.request:Request": (
        *("request_id", "status", "all_token_ids", "num_tokens", "num_computed_tokens", "prefill_stats"),
        *("num_in_flight_tokens", "next_decode_eligible_step", "kv_transfer_params", "sampling_params"),
    ),
    "vllm.v1.core.sched.output:NewRequestData": ("req_id", "num_computed_tokens"),
    "vllm.v1.core.sched.output:SchedulerOutput": ("scheduled_new_reqs",),
    "vllm.v1.metrics.stats:SchedulerStats": ("num_running_reqs", "num_waiting_reqs", "kv_cache_usage"),
    "vllm.v1.metrics.stats:IterationStats": ("num_preempted_reqs",),
    f"{_CONNECTOR}:KVConnectorBase_V1": ("_get_connector_metadata", "_kv_cache_manager"),
    "vllm.v1.worker.gpu_input_batch:InputBatch": ("logitsprocs",),
    "vllm.v1.structured_output:StructuredOutputManager": ("backend",),
    "vllm.config:ModelConfig": (
        *("enable_sleep_mode", "max_model_len", "runner_type", "get_vocab_size", "get_num_experts"),
    ),
    "vllm.config:CompilationConfig": ("static_forward_context",),
    "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner": ("routed_experts",),
    "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts": ("quant_method",),
    "vllm.config:CacheConfig": ("block_size", "num_gpu_blocks"),
    "vllm.config:SchedulerConfig": ("max_num_batched_tokens",),
}


@pytest.fixture(params=["installed", "newest"], scope="module")
def vllm(request: pytest.FixtureRequest) -> Sources:
    if request.param == "newest":
        if not _NEWEST.exists():
            pytest.skip("the sources of the newest vLLM are not there: make vllm-sources")
        return Sources(_NEWEST)
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Sources(Path(spec.origin).parents[1])


@pytest.mark.parametrize("path", names.RELIED_ON)
def test_each_name_is_there_and_takes_what_hotswap_gives_it(path: str, vllm: Sources) -> None:
    found = vllm.find(path)
    if wanted := names.RELIED_ON[path]:
        taken = vllm.parameters(found)
        assert taken is None or not (missing := set(wanted) - set(taken)), f"{path} takes no {missing}"


@pytest.mark.parametrize("path", _ATTRIBUTES)
def test_each_attribute_is_there(path: str, vllm: Sources) -> None:
    owner = vllm.find(path)
    for name in _ATTRIBUTES[path]:
        vllm.member(owner, name)


def test_the_second_runner_takes_as_much_of_a_request_as_hotswap_passes_on(vllm: Sources) -> None:
    """More ends its core: it is looked at when the request is there."""
    limits = {
        "vllm.v1.worker.gpu.sample.logit_bias:MAX_NUM_LOGIT_BIAS_TOKENS": MAX_ENTRIES,
        "vllm.v1.worker.gpu.sample.logit_bias:MAX_NUM_STOP_TOKEN_IDS": params._MOST_STOPS + 1,
        "vllm.envs:VLLM_MAX_NUM_BAD_WORDS": params._MOST_BAD_WORDS,
        "vllm.envs:VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": params._MOST_BAD_TOKENS,
    }
    for path, most in limits.items():
        node = vllm.find(path).node
        assert isinstance(node, ast.Assign | ast.AnnAssign)
        assert node.value is not None
        assert ast.literal_eval(node.value) >= most, path


def test_every_name_that_is_looked_up_is_among_those_relied_on() -> None:
    looked_up = {
        str(node.args[0].value)
        for path in _OURS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "named"
        if isinstance(node.args[0], ast.Constant)
    }
    # A class is known by its methods too, a module by what it has.
    known = {name for name in looked_up if any(path.startswith(name) for path in names.RELIED_ON)}
    assert looked_up == known


@pytest.mark.parametrize(("file", "name", "bases"), _OVERRIDES, ids=[name for _, name, _ in _OVERRIDES])
def test_each_override_takes_the_calls_of_its_base(
    file: str, name: str, bases: tuple[str, ...], vllm: Sources
) -> None:
    ours = _methods(file, name)
    for base in bases:
        owner = vllm.find(base)
        for method, node in ours.items():
            if method == "__init__" and name in _OWN_CONSTRUCTORS:
                continue
            try:
                its = vllm.member(owner, method).node
            except Gone:
                continue
            assert kind(node) == kind(its), f"{name}.{method} is a {kind(node)}, vLLM's is a {kind(its)}"
            if isinstance(node, Function) and isinstance(its, Function):
                assert not (why := clash(node, its)), f"{name}.{method} {why}"
        for each in vllm.ancestry(owner):
            for method, node in _members(each).items():
                assert not is_abstract(node) or method in ours, f"{name} lacks {method}"


def test_nothing_of_the_logger_of_metrics_is_left_to_run(vllm: Sources) -> None:
    """Its methods use metrics that are not made; `log` does nothing in the base of them all."""
    own = _methods("stats.py", "Logger")
    for each in vllm.ancestry(vllm.find("vllm.v1.metrics.loggers:PrometheusStatLogger")):
        left = _members(each).keys() - own.keys() - {"log"}
        assert not left, f"{each.node} has {left}"


def test_a_clash_with_a_base_class_is_found() -> None:
    """The two that vLLM 0.33 has had, and one of a renamed parameter."""
    base, other = (_functions(text) for text in ("def f(self, a, *, b): ...", "def f(self, a, **more): ..."))
    assert clash(base, base) == clash(_functions("def f(self, a, c=1, *_, **more): ..."), base) == ""
    assert clash(_functions("def f(self, x, *, b): ..."), base) == "has x where vLLM has a"
    assert clash(_functions("def f(self, a, c, *, b): ..."), base) == "needs c"
    assert clash(base, other) == "takes no **more"
    assert kind(_functions("@classmethod\ndef f(cls): ...")) != kind(ast.parse("f = True").body[0])


def _functions(text: str) -> Function:
    (node,) = ast.parse(text).body
    assert isinstance(node, Function)
    return node


def _members(found: Found) -> dict[str, ast.AST]:
    return {node.name: node for node in getattr(found.node, "body", []) if isinstance(node, Function)}


def _methods(file: str, name: str) -> dict[str, ast.AST]:
    """Return the attributes that a class of ours defines; an alias of a method is the method."""
    tree = ast.parse((_OURS / file).read_text())
    (node,) = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name]
    own: dict[str, ast.AST] = {**_members(Found(file, node))}
    for statement in node.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            alias = statement.value.id if isinstance(statement.value, ast.Name) else ""
            own[statement.targets[0].id] = own.get(alias, statement)
    return own
