"""The names of vLLM that hotswap uses, and the parameters of each that it relies on.

Most of them are internal to vLLM. So versions are pinned to a range (`hotswap[vllm]`), and `drift` reports
what an installed version has changed; a test checks it, and it can be called before another version is tried.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

__all__ = ["RELIED_ON", "drift", "named"]

_ENGINE = "vllm.v1.engine.async_llm:AsyncLLM"
_ARGUMENTS = "vllm.engine.arg_utils:AsyncEngineArgs"
_SAMPLING = "vllm.sampling_params:SamplingParams"
_LORA = "vllm.lora.request:LoRARequest"
_GUIDANCE = "vllm.v1.structured_output.backend_guidance"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_SAMPLER = "vllm.v1.sample.sampler:Sampler"
_RANKS = "vllm.distributed.parallel_state"
_LINEAR = "vllm.model_executor.layers.linear"
_LINEAR_ARGUMENTS = ("bias", "params_dtype", "quant_config", "prefix", "disable_tp")
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"

RELIED_ON: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # In our process.
        f"{_ENGINE}.from_vllm_config": ("vllm_config", "stat_loggers"),
        f"{_ENGINE}.add_request": (
            "request_id",
            "prompt",
            "params",
            "lora_request",
            "trace_headers",
            "priority",
        ),
        f"{_ENGINE}.abort": ("request_id", "internal"),
        f"{_ENGINE}.collective_rpc": ("method", "timeout", "args", "kwargs"),
        f"{_ENGINE}.add_lora": ("lora_request",),
        f"{_ENGINE}.remove_lora": ("lora_id",),
        f"{_ENGINE}.sleep": ("level", "mode"),
        f"{_ENGINE}.wake_up": ("tags",),
        f"{_ENGINE}.shutdown": ("timeout",),
        f"{_ENGINE}.errored": (),
        "vllm.config:ObservabilityConfig": ("otlp_traces_endpoint",),
        "vllm.v1.engine.core_client:AsyncMPClient.pause_scheduler_async": ("mode", "clear_cache"),
        "vllm.v1.engine.core_client:AsyncMPClient.resume_scheduler_async": (),
        "vllm.v1.engine.core_client:AsyncMPClient.call_utility_async": ("method", "args"),
        "vllm.v1.engine.output_processor:RequestOutputCollector.get": (),
        "vllm.v1.engine.output_processor:RequestOutputCollector.get_nowait": (),
        "vllm.v1.engine.output_processor:RequestOutputCollector.close": (),
        "vllm.v1.engine.exceptions:EngineDeadError": (),
        _ARGUMENTS: (
            "model",
            "skip_tokenizer_init",
            "load_format",
            "model_loader_extra_config",
            "worker_extension_cls",
            "distributed_executor_backend",
            "dtype",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_memory_bytes",
            "block_size",
            "enforce_eager",
            "enable_prefix_caching",
            "enable_lora",
            "max_loras",
            "max_cpu_loras",
            "max_lora_rank",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "scheduling_policy",
            "enable_sleep_mode",
            "device_ids",
            "gpu_memory_utilization",
            "disable_log_stats",
            "enable_log_requests",
            "otlp_traces_endpoint",
            "kv_transfer_config",
        ),
        f"{_ARGUMENTS}.create_engine_config": (),
        _SAMPLING: (
            "max_tokens",
            "min_tokens",
            "temperature",
            "top_p",
            "top_k",
            "seed",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "min_p",
            "logprobs",
            "prompt_logprobs",
            "logit_bias",
            "_bad_words_token_ids",
            "stop_token_ids",
            "ignore_eos",
            "detokenize",
            "output_kind",
            "extra_args",
            "structured_outputs",
        ),
        "vllm.sampling_params:RequestOutputKind": (),
        "vllm.sampling_params:StructuredOutputsParams": ("json", "regex", "grammar"),
        "vllm.config:KVTransferConfig": ("kv_connector", "kv_connector_module_path", "kv_role"),
        _LORA: ("lora_name", "lora_int_id", "lora_path"),
        "vllm.v1.metrics.loggers:PrometheusStatLogger": ("vllm_config", "engine_indexes"),
        "vllm.v1.metrics.loggers:PrometheusStatLogger.record": (
            "scheduler_stats",
            "iteration_stats",
            "mm_cache_stats",
            "engine_idx",
        ),
        "vllm.v1.executor.uniproc_executor:UniProcExecutor": (),
        "vllm:__version__": (),  # builds for CPUs have another name as packages
        "vllm.platforms:current_platform": (),
        "vllm.platforms.interface:Platform.is_cpu": (),
        "vllm.platforms.interface:Platform.get_device_name": ("device_id",),
        "vllm.platforms.interface:Platform.get_device_total_memory": ("device_id",),
        "vllm.envs:VLLM_USE_V2_MODEL_RUNNER": (),
        "vllm.triton_utils:HAS_TRITON": (),
        # In the process that tries kinds of quantization.
        "vllm.config:set_current_vllm_config": ("vllm_config",),
        f"{_RANKS}:init_distributed_environment": (
            "world_size",
            "rank",
            "distributed_init_method",
            "local_rank",
            "backend",
        ),
        f"{_RANKS}:ensure_model_parallel_initialized": (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
        ),
        f"{_LINEAR}:ReplicatedLinear": ("input_size", "output_size", *_LINEAR_ARGUMENTS),
        f"{_LINEAR}:MergedColumnParallelLinear": ("input_size", "output_sizes", *_LINEAR_ARGUMENTS),
        f"{_LINEAR}:LinearBase": (),
        "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding": (),
        f"{_LINEAR}:LinearMethodBase.process_weights_after_loading": ("layer",),
        "vllm.model_executor.layers.fused_moe.layer:FusedMoEFactory": (
            *("num_experts", "top_k", "hidden_size", "intermediate_size"),
            *("params_dtype", "quant_config", "prefix"),
        ),
        "vllm.forward_context:set_forward_context": ("attn_metadata", "vllm_config"),
        # In the processes of the core.
        "vllm.model_executor.model_loader:register_model_loader": ("load_format",),
        "vllm.model_executor.model_loader:_LOAD_FORMAT_TO_MODEL_LOADER": (),
        "vllm.model_executor.model_loader.base_loader:BaseModelLoader.load_weights": (
            "model",
            "model_config",
        ),
        "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.track_weights_loading": (
            "model",
            "loaded_weights",
        ),
        "vllm.v1.worker.gpu_worker:Worker.reload_weights": (),
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights": ("weights_iterator",),
        "vllm.v1.request:Request.from_engine_core_request": ("request", "block_hasher"),
        "vllm.v1.request:Request.append_output_token_ids": ("token_ids",),
        "vllm.v1.worker.gpu_input_batch:CachedRequestState": (
            "sampling_params",
            "output_token_ids",
        ),
        "vllm.v1.engine.core:EngineCore": (),
        "vllm.v1.request:RequestStatus.RUNNING": (),
        "vllm.v1.metrics.stats:PrefillStats": (
            "num_prompt_tokens",
            "num_computed_tokens",
            "num_cached_tokens",
        ),
        "vllm.v1.kv_cache_interface:FullAttentionSpec": (),
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids": ("request_id",),
        "vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids": (),
        "vllm.v1.core.block_pool:BlockPool.get_new_blocks": ("num_blocks",),
        "vllm.v1.core.block_pool:BlockPool.free_blocks": ("ordered_blocks",),
        "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": (),
        "vllm.v1.core.block_pool:BlockPool.get_cached_block": ("block_hash", "kv_cache_group_ids"),
        "vllm.v1.core.block_pool:BlockPool.cache_full_blocks": (
            "request",
            "blocks",
            "num_cached_blocks",
            "num_full_blocks",
            "block_size",
            "kv_cache_group_id",
        ),
        f"{_CONNECTOR}:KVConnectorBase_V1": ("vllm_config", "role", "kv_cache_config"),
        f"{_CONNECTOR}:KVConnectorBase_V1.on_new_request": ("request",),
        f"{_CONNECTOR}:KVConnectorBase_V1.get_num_new_matched_tokens": ("request", "num_computed_tokens"),
        f"{_CONNECTOR}:KVConnectorBase_V1.update_state_after_alloc": (
            "request",
            "blocks",
            "num_external_tokens",
        ),
        f"{_CONNECTOR}:KVConnectorBase_V1.build_connector_meta": ("scheduler_output",),
        f"{_CONNECTOR}:KVConnectorBase_V1.register_kv_caches": ("kv_caches",),
        f"{_CONNECTOR}:KVConnectorBase_V1.start_load_kv": ("forward_context",),
        f"{_CONNECTOR}:SupportsHMA.request_finished_all_groups": ("request", "block_ids"),
        f"{_CONNECTOR}:KVConnectorMetadata": (),
        "vllm.distributed.kv_transfer:get_kv_transfer_group": (),
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.create_connector": (),
        "vllm.v1.structured_output:StructuredOutputManager._create_grammar": ("request",),
        f"{_GUIDANCE}:GuidanceBackend": ("vllm_config", "tokenizer", "vocab_size"),
        f"{_GUIDANCE}:GuidanceGrammar": ("ll_matcher", "ll_tokenizer", "vocab_size"),
        f"{_RUNNER}:Sampler": ("logprobs_mode",),
        f"{_RUNNER}:build_logitsprocs": ("vllm_config",),
        f"{_RUNNER}:apply_grammar_bitmask": (
            "scheduler_output",
            "grammar_output",
            "input_batch",
            "logits",
        ),
        f"{_SAMPLER}.forward": (
            "logits",
            "sampling_metadata",
            "predict_bonus_token",
            "logprobs_mode_override",
        ),
        f"{_SAMPLER}.apply_logits_processors": ("logits", "sampling_metadata", "predict_bonus_token"),
        f"{_SAMPLER}.sample": ("logits", "sampling_metadata", "logprobs_mode_override"),
        f"{_SAMPLER}.apply_temperature": ("logits", "temp", "all_random"),
        f"{_SAMPLER}.greedy_sample": ("logits",),
        f"{_SAMPLER}.compute_logprobs": ("logits",),
        f"{_SAMPLER}.gather_logprobs": ("logprobs", "num_logprobs", "token_ids"),
        "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p": ("logits", "k", "p"),
        "vllm.v1.sample.metadata:SamplingMetadata": (
            "temperature",
            "all_random",
            "top_k",
            "top_p",
            "max_num_logprobs",
            "logitsprocs",
        ),
        "vllm.v1.outputs:LogprobsTensors": ("logprob_token_ids", "logprobs", "selected_token_ranks"),
        "vllm.v1.sample.logits_processor:LogitsProcessor.apply": ("logits",),
        "vllm.v1.sample.logits_processor:LogitsProcessor.update_state": ("batch_update",),
        "vllm.v1.sample.logits_processor:process_dict_updates": (
            "req_entries",
            "batch_update",
            "new_state",
        ),
        "vllm.triton_utils.dispatcher:_rebind_kernels": ("overrides",),
    }
)
"""Every name that is used, and the parameters by which it is called."""


def named(path: str) -> Any:
    """Return what lies at `"module:name.name"`, or the module itself.

    Raises:
        ImportError: there is no such module.
        AttributeError: it has no such name.
    """
    module, _, names = path.partition(":")
    found: Any = import_module(module)
    for name in filter(None, names.split(".")):
        found = getattr(found, name)
    return found


def drift() -> list[str]:
    """Return a sentence for each name of the installed vLLM that is not as hotswap needs it."""
    return [sentence for path, wanted in RELIED_ON.items() if (sentence := _difference(path, wanted))]


def _difference(path: str, wanted: tuple[str, ...]) -> str:
    try:
        found = named(path)
    except (ImportError, AttributeError) as exc:
        return f"{path} is gone: {exc}."
    if not wanted:
        return ""
    signature = inspect.signature(found)
    parameters = signature.parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return ""
    missing = [name for name in wanted if name not in parameters]
    return f"{path} takes no {', '.join(missing)} any more: it is now {path}{signature}." if missing else ""
