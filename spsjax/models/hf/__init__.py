"""Folders in the Hugging Face layout: configs, weights, the hub."""
