"""The parts of `moa.convert`: finding feed-forward layers, refusing some, starting a mixture from their function."""
