"""Benchmarks, each printing a ratio beside a peer or a limit: `python -m benchmarks`."""
