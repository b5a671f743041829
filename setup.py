from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["speccascade_jax", "speccascade_jax.*"]), "speccascade_jax.configs"],
    package_dir={"speccascade_jax.configs": "configs"},
)
