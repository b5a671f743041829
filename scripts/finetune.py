import sys

from speccascade_jax.commands import launch

launch(["finetune", *sys.argv[1:]])
