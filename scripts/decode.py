import sys

from speccascade_jax.commands import launch

launch(["decode", *sys.argv[1:]])
