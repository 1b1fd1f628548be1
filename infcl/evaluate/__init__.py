"""Zero-shot, retrieval and validation loss on all ranks. The trainer runs the tasks of tasks.py."""
