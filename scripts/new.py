import sys

from speccascade_jax.commands import launch

launch(["new", *sys.argv[1:]])
