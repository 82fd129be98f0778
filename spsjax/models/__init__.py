"""Decoder-only transformers, and their weights in model folders."""
