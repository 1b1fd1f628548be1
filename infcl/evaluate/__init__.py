"""Zero-shot, retrieval and validation loss, on all ranks: features, then scores; tasks are what a trainer runs."""
