"""The packages of the wheel. The presets, which are in ds_configs in a checkout, are infcl/ds_configs there."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["infcl*", "megatron_patches*"]), "infcl.ds_configs"],
    package_dir={"infcl.ds_configs": "ds_configs"},
    py_modules=["pretrain_clip"],
)
