"""Task folders in Harbor's format: read, refused where they ask for what there is not, made."""
