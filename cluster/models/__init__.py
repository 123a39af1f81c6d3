"""Target and draft families, checkpoint formats, and the registry that tells them apart."""
