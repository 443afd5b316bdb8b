"""These tests need vLLM, which has an environment of its own: `make test` runs them there."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
