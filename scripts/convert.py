import sys

from speccascade_jax.commands import launch

launch(["convert", *sys.argv[1:]])
