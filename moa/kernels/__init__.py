"""Implementations of the fused mixture; `moa.fused` chooses among them."""
