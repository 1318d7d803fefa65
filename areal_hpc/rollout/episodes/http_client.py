"""Shared HTTP client for the agents' OpenAI SDK."""

import importlib
import logging
from typing import Any

CONNECT_TIMEOUT_S = 10.0


def make_http_client(request_timeout_s: float) -> Any:
    """A client for `AsyncOpenAI(http_client=...)`, to be shared by every episode of the process.

    A client of one's own costs an agent 14-27 ms of CPU per episode (it builds an SSL context);
    a shared one 0.03 ms. The SDK's aiohttp transport is preferred: the pool of httpx searches
    all its connections for every request, which grows with the square of the concurrency.

    Must be called in a running event loop. Without the SDK it is a plain `httpx.AsyncClient`.
    """
    for name in ("httpx", "httpx2"):
        # They log every request at INFO: at hundreds of requests a second that is all one sees.
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        sdk = importlib.import_module("openai")
        wants_httpx2 = int(sdk.__version__.split(".")[0]) >= 3
        http = importlib.import_module("httpx2" if wants_httpx2 else "httpx")
    except ModuleNotFoundError:
        sdk = None
        http = importlib.import_module("httpx")
    options = {
        "timeout": http.Timeout(request_timeout_s, connect=CONNECT_TIMEOUT_S),
        "limits": http.Limits(max_connections=None, max_keepalive_connections=None),
        # The proxy is on this node: proxy variables of the site must not apply.
        "trust_env": False,
    }
    if sdk is None:
        return http.AsyncClient(**options)
    try:
        return sdk.DefaultAioHttpClient(**options)
    except (AttributeError, RuntimeError):  # an SDK before 1.92, or without its aiohttp extra
        return sdk.DefaultAsyncHttpxClient(**options)
