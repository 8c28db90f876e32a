"""Reading checkpoints: index and shards, names, tensors in pieces, and quantised forms."""
