"""Task folders in Harbor's format: reading them, checking their support, building their images."""
