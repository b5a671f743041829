import sys

from speccascade_jax.commands import main

sys.exit(main(["finetune", *sys.argv[1:]]))
