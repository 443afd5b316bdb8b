"""These tests need xllamacpp, which has no build for some systems."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("xllamacpp") else ["test_*.py"]
