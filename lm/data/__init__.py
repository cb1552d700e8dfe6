"""Text on its way to the model: documents read from a source, token shards on disk, packed sequences."""
