"""From a manifest to packed rows with their advantages."""
