import sys

from speccascade_jax.commands import main

sys.exit(main(["fewshot", *sys.argv[1:]]))
