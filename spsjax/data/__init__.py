"""Texts and tokens to train on: documents, conversations, columns, batches."""
