"""All that is DeepSpeed's: engine, sharded state, optimizers, schedules and patches."""
