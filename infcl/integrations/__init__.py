"""Losses of infcl for other trainers. Each module requires the package after which it is named."""
