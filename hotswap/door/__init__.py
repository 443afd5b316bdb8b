"""A fleet behind HTTP: OpenAI's endpoints and an operator's, as an application of ASGI.

`create_app(fleet)` gives the application, and `listen` serves one; `docs/door.md` says what is served.
"""

from hotswap.door.app import create_app
from hotswap.door.calls import ToolFormat
from hotswap.door.keys import ApiKey
from hotswap.door.limits import Limits
from hotswap.door.metrics import Metrics, PrometheusMetrics
from hotswap.door.parsers import ReasoningFormat
from hotswap.door.served import Served
from hotswap.door.server import listen

__all__ = [
    "ApiKey",
    "Limits",
    "Metrics",
    "PrometheusMetrics",
    "ReasoningFormat",
    "Served",
    "ToolFormat",
    "create_app",
    "listen",
]
