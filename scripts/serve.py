import sys

from speccascade_jax.commands import launch

launch(["serve", *sys.argv[1:]])
