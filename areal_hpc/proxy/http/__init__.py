"""HTTP application of the proxy: routes, keys, server-sent events. Begin with `app.py`."""
