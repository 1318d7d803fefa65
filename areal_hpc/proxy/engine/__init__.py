"""SGLang as the proxy sees it: client, router, failover, parsers."""
