import sys

from speccascade_jax.commands import launch

launch(["fewshot", *sys.argv[1:]])
