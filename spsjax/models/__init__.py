"""The decoder, and its weights in and out of model folders."""
