"""Finds the packages below the five top folders; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = ("kernels", "kvcache", "model", "spec_decode", "experiments")

setup(
    package_dir={f"page4.{folder}": folder for folder in FOLDERS},
    packages=[
        f"page4.{name}"
        for folder in FOLDERS
        for name in (folder, *(f"{folder}.{sub}" for sub in find_packages(folder)))
    ],
)
