"""Llama language models with any feed-forward kind of `moa`."""
