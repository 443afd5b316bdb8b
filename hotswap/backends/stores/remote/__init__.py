"""`RemoteStore`: the tier in an object store or on an HTTP server: S3, GCS, Azure, any with byte ranges."""

from __future__ import annotations

try:
    from hotswap.backends.stores.remote.store import RemoteStore
except ModuleNotFoundError as exc:
    from hotswap.errors import BackendMissing

    if exc.name != "obstore":
        raise
    raise BackendMissing("A remote store needs the obstore library: pip install 'hotswap[remote]'.") from exc

__all__ = ["RemoteStore"]
