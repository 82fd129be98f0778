"""Files, caches, progress and other helpers without knowledge of models."""
