"""Text to windows: documents, ids, shards, windows, and the order in which they are read."""
