"""A fleet and its door as a file: TOML in, plain objects out, every error by its place.

`read_config(path)` checks a file, `build(config)` makes what it describes; `docs/serve.md` has every section.
"""

from hotswap.config.building import Serving, build
from hotswap.config.reading import read_config
from hotswap.config.schema import FleetConfig, schema

__all__ = ["FleetConfig", "Serving", "build", "read_config", "schema"]
