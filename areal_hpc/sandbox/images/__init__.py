"""Root file systems of sandboxes: images and archives, and how they are unpacked."""
