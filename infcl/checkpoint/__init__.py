"""Run folders and checkpoints: format, load, write."""
