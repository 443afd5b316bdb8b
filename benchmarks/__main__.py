"""List the benchmarks, or run one or all of them.

python -m benchmarks                    run all, each with its quick settings
python -m benchmarks --list             say what there is
python -m benchmarks load --help        the settings of one
python -m benchmarks load --full        run one with its own settings
"""

from __future__ import annotations

import sys
from importlib import import_module

BENCHMARKS = {
    "aegaeon": "token-level turns beside request-level swaps in simulation: how many models an engine holds",
    "aegaeon_kv": "turns with KV blocks kept in host memory beside computing them again, in simulation",
    "aegaeon_engine": "seven small models by turns on one real engine, with KV blocks kept or computed again",
    "adapters": "low-rank adapters: steps with up to 20 in a batch, loading, dropping, memory",
    "beside": "swaps on one engine beside 16 streams on another: their inter-token latency",
    "coverage": "which architectures are served exactly: a miniature of each, token for token",
    "door": "processor time of a server per token: this door, one that validates each token, and vLLM's own",
    "elastic": "load that moves between two engines of one device: memory that follows beside fixed halves",
    "elastic_engine": "the same on two real engines of one CPU, with the memory that is resident",
    "engine": "tokens per second of processor time: this engine, vLLM and transformers on a CPU",
    "fit": "a simulated engine beside the real one that it was fitted to: mean TTFT and TPOT of a trace",
    "forecast": "models loaded before their time of the day beside the default scheduler, in simulation",
    "fuzz": "the readers of a store, given indexes and files mutated at random: 100,000 cases",
    "grammar": "a step of requests with JSON schemas beside one without, and answers to random schemas",
    "kernels": "a linear layer with FP8 weights beside the same with bfloat16 weights, on a CPU",
    "kv": "a swap with KV blocks kept in host memory beside computing them again, by context",
    "kv_process": "engines in processes: their KV blocks kept there beside the process of the fleet",
    "linear": "linear layers on a CPU by our kernel, beside oneDNN",
    "killed": "a process of an engine killed under 100 streams: how long their clients wait",
    "lengths": "steps of decodes of different lengths, and with one replaced in each step, beside equal ones",
    "llumnix": "latencies of dispatch, moves, priorities and scaling simulated, beside Llumnix's figures",
    "load": "weights into host memory: this store, the raw disk, and the loaders people use today",
    "migrate": "requests that move: how long clients wait, by method and context, and steps of other streams",
    "n": "eight samples of a long prompt beside one request, and beside eight prompts",
    "overhead": "what a fleet adds to each token over the engine's own stream",
    "papers": "what papers report, beside what the shipped policies do in simulation",
    "policies": "how long routes and plans take, from ten instances to ten thousand",
    "pre_placement": "models placed in the memory of more nodes ahead of loads, in simulation",
    "remote": "weights from another node beside a plain socket, and to four nodes beside one",
    "requests": "two engines given requests at random, valid, invalid and hostile: how each ends, and memory",
    "sampling": "a step of sampled tokens on a CPU beside greedy ones, and beside vLLM's own sampler",
    "serverlessllm": "startup latency by scheduler on nodes with finite memory, in simulation",
    "texts": "how long the event loop stands still while texts of 2 MB come in beside 16 streams",
    "traces": "how many engines each policy needs for 99 % of targets on real traces, in simulation",
    "simulate": "requests that a second of a processor simulates, from 16 engines to 10,000",
    "turns": "random simulations of every shipped scheduler: stalls, errors, and whether both drivers agree",
    "unseen": "how many engines each policy needs on loads that none was tuned to, in simulation",
    "vllm_migrate": "a request that moves between vLLM cores, with its KV blocks or recomputed",
    "vllm_swap": "a swap inside a running vLLM, beside its own reload of the same bytes and a restart",
    "soak": "four engines under load with moves, drains, swaps and faults: is every stream right?",
}


def main(arguments: list[str]) -> int:
    """Run what the arguments name; the exit status is the worst one."""
    if "--list" in arguments[:1]:
        for name, what in BENCHMARKS.items():
            print(f"{name:12} {what}")
        return 0
    if not arguments or arguments[0].startswith("-"):
        return max(_run(name, arguments) for name in BENCHMARKS)
    if arguments[0] not in BENCHMARKS:
        print(f"There is no benchmark {arguments[0]!r}; there are: {', '.join(BENCHMARKS)}.", file=sys.stderr)
        return 2
    return _run(arguments[0], arguments[1:])


def _run(name: str, arguments: list[str]) -> int:
    status: int = import_module(f"benchmarks.{name}").main(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
