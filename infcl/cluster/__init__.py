"""Several hosts: who takes part, whether they are the same, whether they are still there."""
