"""GGUF files of llama.cpp: header, metadata, tensors."""
