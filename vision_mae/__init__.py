"""Masked autoencoders: a timm vision transformer with any feed-forward kind of `moa`, pre-trained on pictures."""
