"""HTTP of the proxy: application, routes, keys, routes for drivers."""
