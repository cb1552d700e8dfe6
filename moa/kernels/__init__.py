"""Implementations of the fused mixture, among which `moa.fused` chooses; those for a GPU are imported only there."""
