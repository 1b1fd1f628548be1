"""Checks of several hosts: the hostfile, equal software and hardware, reachability."""
