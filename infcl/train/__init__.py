"""TOWER GRADIENTS -> ZeRO STEP, and the loop around it.

Reading order: build -> trainer, results -> preset, engine, engine_state -> optim, optimizers -> run_folder, checkpoint
-> metrics.
"""
