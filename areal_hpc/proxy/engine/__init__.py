"""SGLang as the proxy sees it: client, router, parsers."""
